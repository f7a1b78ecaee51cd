"""The part ``graphs`` of `gpu_parts`: steps with CUDA graphs against steps without, compiled and not."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from panpipe.runtimes.programs.graphs import graph_pool

from benchmarks.gpu.workload import (
    Found,
    Size,
    batch_of,
    clear,
    model_of,
    peak_bytes,
    pipeline_of,
    seconds_of,
    step_in_bfloat16,
    summary,
)


@contextmanager
def graphs_of(size: Size) -> Iterator[None]:
    """A context in which the device has graphs: on the CPU those of the tests, which repeat recorded operators."""
    if size.where.type != "cpu":
        yield
        return
    from panpipe.tests.support.backends.fake_graphs import FakeGraphPool

    with mock.patch.dict(graph_pool._KINDS, {"cpu": FakeGraphPool}):
        yield


def graphs(size: Size) -> Found:
    """A GPT without compilation and with, each without graphs and with: times, memory, and whether the bits are equal.

    The losses and parameters are those after the timed steps. Kernels that add in any order (``atomicAdd``, as in the
    backward of an embedding) may give other bits in every run, with graphs and without: the largest distance is
    recorded, too.
    """
    found: Found = {}
    with graphs_of(size):
        for name, compiler in (("not compiled", None), (f"compile={size.compiler}", size.compiler)):
            without, wanted = steps_of(size, compiler, graphed=False)
            with_graphs, tensors = steps_of(size, compiler, graphed=True)
            pairs = list(zip(wanted, tensors, strict=True))
            equal = {
                "bits": all(torch.equal(one, other) for one, other in pairs),
                "apart": max(float((one - other).abs().max()) for one, other in pairs),
            }
            found[name] = {"without": without, "graphs": with_graphs, "equal": equal}
    return found


def steps_of(size: Size, compiler: str | None, *, graphed: bool) -> tuple[Found, list[torch.Tensor]]:
    """The times of steps of two stages, and the loss and the parameters after them, on the host."""
    clear(size)
    batch, started = batch_of(size), time.perf_counter()
    pipe = pipeline_of(
        size, 2, model_of(size), step_in_bfloat16, batch, partial(torch.optim.SGD, lr=0.1), compile=compiler,
        cuda_graphs=graphed,
    )  # fmt: skip
    loss = pipe.step(batch)
    first_s = time.perf_counter() - started
    seconds, issued = seconds_of(partial(pipe.step, batch), size), list[float]()
    for _ in range(size.steps):
        loss.isfinite().item()  # the device is idle
        start = time.perf_counter()
        loss = pipe.step(batch)
        issued.append(time.perf_counter() - start)
    tensors = [tensor.detach().float().cpu() for tensor in (loss, *pipe.model.parameters())]
    pipe.close()
    times = {**summary(seconds), "issued_s": min(issued), "first_step_s": first_s, "peak_bytes": peak_bytes(size)}
    return times, tensors
