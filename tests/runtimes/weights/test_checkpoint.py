"""Checkpoints in one file and in many: what is found, what does not fit, and advice about other names."""

import pytest
import torch
from panpipe.runtimes.weights.checkpoint import INDEX, SINGLE, Checkpoint, write_index, write_part
from safetensors.torch import save_file

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4), "b.steps": torch.tensor(7)}


@pytest.fixture
def parts(tmp_path):
    """A folder with a checkpoint of two parts."""
    where, size = {}, 0
    for number, names in enumerate((["a.weight"], ["b.weight", "b.steps"])):
        file, bytes_ = write_part(tmp_path / "parts", number, 2, {name: TENSORS[name] for name in names})
        where.update(dict.fromkeys(names, file))
        size += bytes_
    write_index(tmp_path / "parts", where, size)
    return tmp_path / "parts"


@pytest.mark.parametrize("entry", ["", INDEX])
def test_tensors_of_all_parts_are_read(parts, entry):
    checkpoint = Checkpoint(parts / entry)
    found = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    checkpoint.read_into(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert checkpoint.find(["c", "b.weight", "a.weight"]) == "b.weight"
    assert checkpoint.find(["c"]) is None
    assert checkpoint.find(["module._orig_mod.b.weight"]) == "b.weight"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrapped_modules_are_found(prefix, tmp_path):
    save_file({prefix + name: tensor for name, tensor in TENSORS.items()}, tmp_path / SINGLE)
    assert Checkpoint(tmp_path).find(["b.weight"]) == f"{prefix}b.weight"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_other_floating_point_types_fit(parts, dtype):
    Checkpoint(parts).check("b.weight", "parameter", torch.empty(4, dtype=dtype, device="meta"))
