"""Parameters of which each replica holds a part, on threads over the transport of one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from panpipe.backends.memcpy import connect
from panpipe.core.errors import RequestError
from panpipe.runtimes.update.buckets import Sharing
from panpipe.runtimes.update.shards import Shards
from panpipe.runtimes.weights.remote_tensors import RemoteTensor
from torch import nn

SHAPES = {"w": (3, 5), "scalar": (), "b": (7,), "empty": (0, 4), "conv": (2, 3, 2, 2), "tied": (4, 3)}


def model():
    generator = torch.Generator().manual_seed(0)
    found = {n: nn.Parameter(torch.randn(shape, generator=generator)) for n, shape in SHAPES.items()}
    with torch.no_grad():
        found["conv"].data = found["conv"].data.to(memory_format=torch.channels_last)
    return found


def on_each(count, work):
    ends = connect(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, ends))


WHOLE = model()


def shards_of(end, count, parameters=None, own=True):
    sharing = Sharing(lambda: end, end.device, count, frozenset({"tied"}), gradients=True, parameters=True)
    named = model() if parameters is None else parameters
    shards = Shards(named, sharing)
    if own:
        shards.shared.own_memory()
    return named, shards


def test_lent_parameters_may_be_referenced_and_changed_values_are_kept():
    def work(end):
        named, shards = shards_of(end, 2)
        shared = shards.shared
        shared.keep_parts()
        shared.lend(end)
        array = named["w"].detach().numpy()  # such memory cannot be freed
        with torch.no_grad():
            named["b"].fill_(7.0)
        shared.take_back(keep=True)
        assert isinstance(named["w"], RemoteTensor)
        shared.lend(end)
        with torch.no_grad():
            named["b"].fill_(8.0)
        shared.take_back(keep=False)
        shared.gather(end).wait()
        assert torch.equal(named["w"], WHOLE["w"])
        assert (array == WHOLE["w"].detach().numpy()).all()
        return named["b"].tolist()

    assert on_each(2, work) == [[7.0] * 7] * 2


def test_parameters_that_overlap_in_memory_are_refused():
    def work(end):
        with pytest.raises(RequestError, match=r"parameter 'p' has strides \(0, 1\) for shape \(2, 3\): .*dense"):
            shards_of(end, 2, parameters={"p": nn.Parameter(torch.ones(3).expand(2, 3))}, own=False)
        return True

    assert on_each(2, work) == [True, True]


def test_memory_that_numpy_uses_is_refused_where_it_would_be_freed():
    def work(end):
        named, shards = shards_of(end, 2)
        shards.shared.keep_parts()
        shards.shared.gather(end).wait()
        named["w"].detach().numpy()
        with pytest.raises(RequestError, match=r"the memory of parameter 'w' is used outside of PyTorch, as by .numpy"):
            shards.shared.free()
        return True

    assert on_each(2, work) == [True, True]
