"""Whole tensors of a checkpoint and the parts of tensor ranks."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.runtimes.checkpoint.reading import StoredTensor
from panpipe.runtimes.checkpoint.state_parts import Parts
from panpipe.runtimes.checkpoint.whole_parts import PartReader, gathered, narrowed, split_of
from panpipe.runtimes.launch.tensor_team import Split

WHOLE = torch.arange(8.0).reshape(4, 2)


class Team:
    """Rank 1 of two, which divide rows of ``up.weight``."""

    def __init__(self):
        self.gathered = []

    def split_of(self, name, shape):
        return Split(0, 1, 2) if name == "up.weight" and len(shape) == 2 else None

    def gather(self, part, split):
        self.gathered.append(part)
        return torch.cat([part - 4, part])


PART, PLAIN = WHOLE[2:], torch.ones(3)


@pytest.mark.parametrize(
    ("name", "tensor", "divided"),
    [
        ("model.up.weight", PART, True), ("model.norm.weight", PART, False), ("model.up.weight", PLAIN, False),
        ("optimizer.state.up.weight.exp_avg", PART, True), ("optimizer.state.up.weight.step", torch.tensor(1.0), False),
        ("optimizer.state.up.weight.inner.exp_avg", PART, True), ("optimizer.state.norm.exp_avg", PART, False),
        ("ema.0.tensors.up.weight", PART, True), ("ema.0.tensors.norm.weight", PART, False),
    ],
)  # fmt: skip
def test_tensors_of_a_divided_parameter_are_divided_alike(name, tensor, divided):
    assert (split_of(name, tensor, Team()) is not None) is divided


def test_parts_are_gathered_in_one_order_on_all_ranks():
    team = Team()
    own = {
        "optimizer.state.up.weight.exp_avg": PART, "model.up.weight": PART.clone(), "model.norm.weight": PLAIN,
    }  # fmt: skip
    found = gathered(Parts(own, {"progress.steps": 3}), team)
    assert torch.equal(found.tensors["model.up.weight"], WHOLE)
    assert found.tensors["model.norm.weight"] is PLAIN
    assert found.items == {"progress.steps": 3}
    assert [part is own["model.up.weight"] for part in team.gathered] == [True, False]  # sorted by name
    assert list(own) == list(found.tensors)


def test_own_parts_are_taken_of_whole_tensors():
    own = {"model.up.weight": PART, "ema.0.tensors.up.weight": PART, "model.norm.weight": PLAIN}
    given = Parts(
        {"model.up.weight": WHOLE, "ema.0.tensors.up.weight": PLAIN, "model.norm.weight": PLAIN, "model.other": WHOLE},
        {"progress.steps": 3},
    )
    found = narrowed(given, own, Team())
    assert torch.equal(found.tensors["model.up.weight"], PART)
    assert found.tensors["model.up.weight"].untyped_storage().nbytes() == PART.nbytes
    assert found.tensors["ema.0.tensors.up.weight"] is PLAIN  # another shape, which is refused later
    assert found.tensors["model.other"] is WHOLE
    assert found.items == {"progress.steps": 3}


class Reader:
    """A checkpoint in memory."""

    def __init__(self, **tensors):
        self.values = tensors
        self.tensors = {n: StoredTensor(tuple(t.shape), t.dtype, None) for n, t in tensors.items()}
        self.items, self.manifest, self.folder = {"progress.steps": 3}, SimpleNamespace(), "folder"
        self.read = []

    def read_into(self, tensors):
        self.read.append(sorted(tensors))
        for name, tensor in tensors.items():
            tensor.copy_(self.values[name])


def test_reader_has_the_shapes_and_values_of_the_parts():
    reader = Reader(**{"model.up.weight": WHOLE, "model.norm.weight": PLAIN})
    own = {"model.up.weight": torch.zeros(2, 2).requires_grad_(), "model.norm.weight": torch.zeros(3)}
    found = PartReader(reader, own, Team())
    assert {name: kept.shape for name, kept in found.tensors.items()} == {
        "model.up.weight": (2, 2), "model.norm.weight": (3,),
    }  # fmt: skip
    found.read_into(own)
    assert own["model.up.weight"].tolist() == PART.tolist()
    assert own["model.norm.weight"].tolist() == PLAIN.tolist()
    assert reader.read == [["model.norm.weight"], ["model.up.weight"]]
    assert (found.items, found.manifest, found.folder) == (reader.items, reader.manifest, "folder")


def test_only_the_tensors_that_are_asked_for_are_read():
    reader = Reader(**{"model.up.weight": WHOLE, "model.norm.weight": PLAIN})
    found = PartReader(reader, {"model.up.weight": torch.zeros(2, 2)}, Team())
    found.read_into({"model.norm.weight": torch.zeros(3)})
    assert reader.read == [["model.norm.weight"]]


def test_tensor_that_cannot_be_divided_keeps_its_shape():
    reader = Reader(**{"model.up.weight": torch.ones(3, 2)})
    found = PartReader(reader, {"model.up.weight": torch.zeros(2, 2)}, Team())
    assert found.tensors["model.up.weight"].shape == (3, 2)
