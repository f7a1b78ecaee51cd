"""Plain data over a process group: values of any length, and bytes that are none of ours."""

import pytest
import torch
import torch.distributed as dist
from panpipe.backends import data_collectives
from panpipe.backends.data_collectives import all_gather_data
from panpipe.core.errors import WorkerError

VALUE = {"plan": [1, 2.5, None, "ä"], "done": True}


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """Collectives of two ranks that are not there: tests set what they do."""

    class Group:
        _device_types = (torch.device("cpu"),)

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    before, dist.group.WORLD = dist.group.WORLD, Group()
    yield
    dist.group.WORLD = before


def other_rank(monkeypatch, length, data):
    """The second rank gathers these."""

    def gather(found, own, group=None):
        found[0].copy_(own)
        other = torch.tensor([length]) if own.dtype == torch.int64 else data
        found[1].copy_(torch.nn.functional.pad(other, (0, own.numel() - other.numel())))

    monkeypatch.setattr(dist, "all_gather", gather)


def encoded(value):
    return data_collectives._bytes(value, None)


@pytest.mark.parametrize("length", [0, -1, (1 << 31) + 1])
def test_length_of_another_program_is_refused(monkeypatch, length):
    other_rank(monkeypatch, length, encoded(0))
    with pytest.raises(
        WorkerError, match=f"a rank announced plain data of {length} bytes: all ranks must run the same"
    ):
        all_gather_data(VALUE)


def test_bytes_that_are_no_plain_data_are_refused_with_their_rank(monkeypatch):
    other_rank(monkeypatch, 3, torch.tensor([255, 254, 253], dtype=torch.uint8))
    with pytest.raises(WorkerError, match="rank 1 sent data that cannot be read"):
        all_gather_data(VALUE)


def test_value_that_is_no_plain_data_is_refused(monkeypatch):
    other_rank(monkeypatch, 1, encoded(0))
    with pytest.raises(TypeError):
        all_gather_data(object())
