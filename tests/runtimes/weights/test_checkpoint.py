"""Checkpoints in one file and in many: what is found, what does not fit, and advice about other names."""

import json

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.weights.checkpoint import INDEX, SINGLE, Checkpoint, write_index, write_part
from safetensors.torch import load_file, save_file

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


def test_parts_and_index_are_in_the_layout_of_transformers(parts):
    index = json.loads((parts / INDEX).read_text(encoding="utf-8"))
    assert index["metadata"] == {"total_size": 24 + 16 + 8}
    assert index["weight_map"]["b.steps"] == "model-00002-of-00002.safetensors"
    assert torch.equal(load_file(parts / "model-00001-of-00002.safetensors")["a.weight"], TENSORS["a.weight"])


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


def test_folder_with_one_file_and_the_file_itself_are_checkpoints(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    for path in (tmp_path, tmp_path / SINGLE):
        assert Checkpoint(path).entry("a.weight").shape == (2, 3)
    with pytest.raises(RequestError, match=r"has a model\.safetensors, which readers would read instead"):
        write_part(tmp_path, 0, 1, TENSORS)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("a.weight", torch.empty(3, 2), r"has shape \(2, 3\) in .* and \(3, 2\) in the model: they must be equal"),
        ("b.steps", torch.empty(()), r"is I64 in .* and torch\.float32 in the model: only floating-point types"),
        ("b.weight", torch.empty(4, dtype=torch.bool), "is F32 in .* and torch.bool in the model"),
    ],
)
def test_tensor_of_another_shape_or_kind_is_refused(parts, name, tensor, said):
    with pytest.raises(RequestError, match=rf"parameter '{name}' {said}"):
        Checkpoint(parts).check(name, "parameter", tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_other_floating_point_types_fit(parts, dtype):
    Checkpoint(parts).check("b.weight", "parameter", torch.empty(4, dtype=dtype, device="meta"))


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        (["weight"], "it has them with the prefix 'a.': give the module"),
        (["model.a.weight", "model.b.weight"], "it has them without 'model.': give the module"),
        (["model.a.weight", "model.c"], "give the checkpoint of this model"),
        (["c"], "give the checkpoint of this model"),
    ],
)
def test_missing_parameters_are_named_with_advice_about_their_prefix(parts, missing, advice):
    said = str(Checkpoint(parts).lacking(missing, 9))
    assert f"lacks parameter '{missing[0]}'" in said
    assert "of the 9 that the step reads" in said
    assert advice in said or (missing == ["weight"] and "with the prefix 'b.'" in said)


def damage(index):
    def change(text):
        return lambda folder: (folder / INDEX).write_text(text, encoding="utf-8")

    return change(index)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damage("{"), "is not the index of a checkpoint"),
        (damage('{"weight_map": 3}'), "is not the index of a checkpoint"),
        (damage('{"weight_map": {"a": "none.safetensors"}}'), r"names 'none\.safetensors', which is not in its folder"),
        (
            damage('{"weight_map": {"c": "model-00001-of-00002.safetensors"}}'),
            "says that 'c' is in .*, but that file does not",
        ),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "has neither model"),
    ],
)
def test_index_that_does_not_fit_its_files_is_refused(parts, change, said):
    change(parts)
    with pytest.raises(RequestError, match=said) as error:
        Checkpoint(parts)
    assert "\n" not in str(error.value)
