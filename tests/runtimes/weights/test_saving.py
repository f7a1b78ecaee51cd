"""Which tensors of a model a checkpoint of weights has, and who writes them."""

import json

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.weights import saving
from panpipe.runtimes.weights.saving import savable, save_checkpoint
from safetensors.torch import load_file
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.other.weight = self.one.weight
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("mask", torch.zeros(2), persistent=False)
        self.far = nn.Parameter(torch.ones(1, device="meta"))


@pytest.fixture
def team():
    made = ThreadTeam(2)
    yield made
    made.close()


def written(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def test_savable_tensors_are_here_and_persistent_and_under_one_name():
    model = Tied()
    found = savable(model)
    assert set(found) == {"one.weight", "frozen", "mean"}
    assert found["one.weight"] is model.one.weight


def test_checkpoint_of_one_process_has_every_tensor_once(tmp_path, team):
    model = Tied()
    save_checkpoint(tmp_path, model, team)
    found = written(tmp_path)
    assert set(found) == {"one.weight", "frozen", "mean"}
    assert torch.equal(found["one.weight"], model.one.weight)
    (index,) = tmp_path.glob("*.index.json")
    assert set(json.loads(index.read_text())["weight_map"]) == set(found)


def test_frozen_tensors_may_be_left_out(tmp_path, team):
    save_checkpoint(tmp_path, Tied(), team, frozen=False)
    assert set(written(tmp_path)) == {"one.weight"}


def test_failure_to_write_is_raised_and_no_index_is_written(tmp_path, team, monkeypatch):
    def fails(*_):
        raise RequestError("the disk is full")

    monkeypatch.setattr(saving, "write_part", fails)
    with pytest.raises(RequestError, match="the disk is full"):
        save_checkpoint(tmp_path, Tied(), team)
    assert not list(tmp_path.iterdir())
