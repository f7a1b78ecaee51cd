"""The state of training as named parts, and back; the two files of a process."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.core.files.limits import Limits
from panpipe.runtimes.checkpoint import state_parts
from panpipe.runtimes.checkpoint.state_parts import (
    PartNames,
    Parts,
    items_text,
    parts_of,
    read_items,
    state_of,
    write_parts,
)
from panpipe.runtimes.weights.tensor_files import TensorFile

STATE = {
    "model": {"layer.weight": torch.ones(2)},
    "optimizer": {"state.layer.weight.exp_avg": torch.zeros(2), "param_groups.layer.weight.lr": torch.tensor(0.1)},
    "stepped": {"layer.weight": True},
    "progress": {"steps": 3},
    "scheduler": ("StepLR", {"gamma": 0.5}),
    "ema": {"0": {"updates": 7, "tensors": {"layer.weight": torch.ones(2)}}},
}


def test_tensors_and_items_have_names_by_section():
    found = parts_of(STATE)
    assert list(found.tensors) == [
        "model.layer.weight", "optimizer.state.layer.weight.exp_avg", "ema.0.tensors.layer.weight",
    ]  # fmt: skip
    assert found.items["progress.steps"] == 3
    assert found.items["ema.0.updates"] == 7
    assert found.items["scheduler"] == ("StepLR", {"gamma": 0.5})
    assert "optimizer.param_groups.layer.weight.lr" in found.items  # other stages have it, too
    assert found.only(["progress.steps", "model.layer.weight"]).names == ["model.layer.weight", "progress.steps"]


def test_state_of_its_parts_is_the_state():
    found = state_of(parts_of(STATE))
    assert found == STATE
    assert found["model"]["layer.weight"] is STATE["model"]["layer.weight"]


@pytest.mark.parametrize("name", ["other.x", "model", "model."])
def test_part_of_no_section_is_refused(name):
    with pytest.raises(ValueError, match=f"it has '{name}', which is no part of the state of training"):
        state_of(Parts(items={name: 1}))


def test_files_have_names_with_numbers_of_five_digits():
    names = PartNames(2, 12)
    assert (names.tensors, names.items) == ("tensors-00002-of-00012.safetensors", "items-00002-of-00012.json")


def test_items_are_read_as_written_with_dtypes_that_safetensors_lacks(tmp_path):
    names = PartNames(1, 1)
    tensors = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex128)}
    records = write_parts(tmp_path, names, Parts(tensors, {"progress.steps": 3}))
    assert set(records) == {names.tensors, names.items}
    assert read_items(tmp_path / names.items) == ({"progress.steps": 3}, {"b": torch.complex128})


def test_one_number_with_a_stride_is_stored_as_bytes(tmp_path):
    numbers = torch.tensor([0, 1, 2, 3], dtype=torch.complex128)
    names = PartNames(1, 1)
    write_parts(tmp_path, names, Parts({"b": numbers[2::4]}))
    found = torch.zeros(1, 16, dtype=torch.uint8)
    TensorFile(tmp_path / names.tensors).read_into("b", found)
    assert found.view(torch.complex128).item() == 2


def test_object_and_sparse_tensor_are_refused(tmp_path):
    with pytest.raises(RequestError, match="a checkpoint can store only plain data"):
        write_parts(tmp_path, PartNames(1, 1), Parts(items={"progress.x": object()}))
    with pytest.raises(RequestError, match=r"'a' is a torch\.sparse_coo tensor"):
        write_parts(tmp_path, PartNames(1, 2), Parts({"a": torch.ones(2).to_sparse()}))


@pytest.mark.parametrize("text", ["[]", '{"items": {}}', '{"items": [], "stored_as_bytes": {}}'])
def test_file_without_items_is_refused(text, tmp_path):
    (tmp_path / "items").write_text(text)
    with pytest.raises(ValueError, match=r"does not have the items of a checkpoint|a list without a tag"):
        read_items(tmp_path / "items")


def test_items_that_could_not_be_read_again_are_not_written(monkeypatch):
    monkeypatch.setattr(state_parts, "ITEMS", Limits(size=100, values=8))
    assert items_text({"a": [1, 2]}, {})
    for items in ({"a": list(range(8))}, {"a": "x" * 100}):
        with pytest.raises(RequestError, match="which no checkpoint can store"):
            items_text(items, {})
