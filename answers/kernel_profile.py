"""Times operators of every kind in several sizes on the device at hand, or those of a model, to fit a device type to
them."""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from ..core.analytic import attention
from ..core.analytic.calibration import Sample
from ..core.analytic.kernels import Kernel, kernel_of
from ..core.analytic.model import ModelWork
from ..core.costs.graph import OpGraph
from ..runtimes.devices.compute import Stopwatch
from ..runtimes.devices.heap import keep_freed_memory

aten = torch.ops.aten

BATCH_S = 2e-3
"""Shortest duration, in seconds, of a sequence of calls that is timed as a whole."""
HOST_CACHES, GPU_CACHES = 64 << 20, 256 << 20
"""Bytes of the operands that calls use in turn: several times a core's own cache, or a GPU's."""
MOST_COPIES = 256
"""Largest number of sets of operands."""


@frozen
class Case:
    """Calls to measure.

    Args:
        name: kind of operator and its size. A fit leaves out all samples of a case together.
    """

    name: str
    calls: dict[str, tuple[Callable[[], Any], Kernel]]


def profile_kernels(device: torch.device, dtype: torch.dtype, *, scale: int = 1, repeats: int = 7) -> list[Sample]:
    """Time operators of each kind in several sizes.

    Args:
        scale: factor on rows, and on elements of memory-bound operators, for a GPU.
        repeats: runs of each; the shortest counts, because disturbances only lengthen a run.

    Returns:
        A sample for each operator and size.
    """
    keep_freed_memory()  # as the executor does
    samples = []
    with torch.no_grad():
        for case in bundled_cases(device, dtype, scale):
            for name, (call, kernel) in case.calls.items():
                seconds = least_s(call, device, repeats)
                samples.append(Sample(f"{name} {case.name}", case.name, (kernel,), seconds))
    return samples


def least_s(call: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """Seconds of a call in the shortest of several runs. A run has enough calls for the clock's resolution."""
    watch, spans = Stopwatch(device, _clock(device)), []
    with watch.active():
        call()  # allocates memory, and selects a kernel
        start = watch.now()
        call()
        once = max(watch.between(start, watch.now()), 1e-7)
        count = max(1, min(1000, round(BATCH_S / once)))
        for _ in range(repeats):
            start = watch.now()
            for _ in range(count):
                call()
            spans.append((start, watch.now()))
        return min(watch.between(*span) for span in spans) / count


def _clock(device: torch.device) -> Callable[[], float]:
    """A clock of the host, in seconds. With one thread it counts the thread's CPU time, without preemptions."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


SHAPES: dict[str, tuple[tuple[Any, ...], ...]] = {
    "product": (
        (32, 64, 64), (64, 256, 256), (128, 768, 768), (512, 256, 1024), (256, 768, 3072), (256, 3072, 768),
        (1024, 512, 512), (512, 1024, 1024), (128, 768, 8192),
    ),
    "batched_product": ((8, 64, 32), (8, 128, 64), (16, 256, 64), (4, 512, 64)),
    "attention": (
        (1, 4, 64, 32, False), (1, 8, 128, 64, True), (1, 12, 256, 64, True), (2, 8, 256, 64, False),
        (1, 12, 512, 64, True), (1, 8, 1024, 64, False),
    ),
    "convolution": (
        (2, 16, 16, 16, 3), (2, 32, 64, 28, 3), (4, 64, 64, 28, 3), (2, 64, 128, 28, 1), (1, 3, 64, 112, 7),
        (4, 128, 128, 14, 3),
    ),
    "normalisation": ((16, 64), (64, 256), (128, 768), (256, 768), (512, 1024), (1024, 1024), (256, 8192)),
    "elementwise": ((1 << 10,), (1 << 13,), (1 << 16,), (1 << 18,), (1 << 20,), (1 << 21,), (1 << 22,)),
    "lookup": ((32, 100, 64), (128, 1000, 256), (256, 8192, 512), (512, 8192, 768), (1024, 4096, 1024)),
}  # fmt: skip
"""The cases by the method that makes them, with its arguments, small to large; the first one grows with ``scale``."""


def bundled_cases(device: torch.device, dtype: torch.dtype, scale: int = 1) -> Iterator[Case]:
    """Operators of every kind in transformers and convolutional networks.

    A case's tensors are allocated when the iterator yields it.
    """
    make = _Maker(device, dtype)
    for kind, shapes in SHAPES.items():
        for first, *others in shapes:
            yield getattr(make, kind)(first * scale, *others)


@frozen
class _Maker:
    """Creates cases on a device, of a dtype."""

    device: torch.device
    dtype: torch.dtype

    def _tensor(self, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=self.device).to(self.dtype)

    def product(self, rows: int, inner: int, columns: int) -> Case:
        x, weight, bias = self._tensor(rows, inner), self._tensor(columns, inner), self._tensor(columns)
        gradient = self._tensor(rows, columns)
        calls = (
            _called("addmm", aten.addmm.default, bias, x, weight.t()),
            _called("mm I", aten.mm.default, gradient, weight),
            _called("mm W", aten.mm.default, gradient.t(), x),
        )
        return Case(f"{rows}×{inner}×{columns}", dict(calls))

    def batched_product(self, batch: int, rows: int, inner: int) -> Case:
        x, y = self._tensor(batch, rows, inner), self._tensor(batch, rows, inner)
        calls = _called("bmm", aten.bmm.default, x, y.transpose(1, 2)), _called("bmm I", aten.bmm.default, self._tensor(
            batch, rows, rows), y)  # fmt: skip
        return Case(f"{batch}×{rows}×{inner}×{rows}", dict(calls))

    def attention(self, batch: int, heads: int, rows: int, size: int, causal: bool) -> Case:
        # The heads of a token are adjacent in memory, as a model's projections return them.
        query, key, value = (self._tensor(batch, rows, heads, size).transpose(1, 2).requires_grad_() for _ in range(3))
        with torch.enable_grad():
            result = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        gradient = torch.ones_like(result)

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

        def backward() -> Any:
            return torch.autograd.grad(result, (query, key, value), gradient, retain_graph=True)

        logsumexp = torch.empty(batch, heads, rows, dtype=torch.float32, device=self.device)
        given = (query, key, value, None)
        known = {
            "attention": (forward, kernel_of(attention.FORWARD, (*given, causal), {}, (result.clone(), logsumexp))),
            "attention I": (
                backward,
                kernel_of(attention.BACKWARD, (gradient, *given, result, logsumexp, causal, False), {},
                          tuple(torch.empty_like(t) for t in (query, key, value))),
            ),
        }  # fmt: skip
        shape = f"{batch}×{heads}×{rows}×{size}{' causal' if causal else ''}"
        return Case(shape, {name: (call, kernel) for name, (call, kernel) in known.items() if kernel is not None})

    def convolution(self, batch: int, channels: int, filters: int, side: int, width: int) -> Case:
        x, weight = self._tensor(batch, channels, side, side), self._tensor(filters, channels, width, width)
        options = (None, [1, 1], [width // 2] * 2, [1, 1], False, [0, 0], 1)
        gradient = self._tensor(batch, filters, side, side)
        calls = [_called("convolution", aten.convolution.default, x, weight, *options)]
        for name, mask in (("convolution I", [True, False, False]), ("convolution W", [False, True, False])):
            calls.append(_called(name, aten.convolution_backward.default, gradient, x, weight, *options, mask))
        return Case(f"{batch}×{channels}×{side}×{side}→{filters}, {width}×{width}", dict(calls))

    def normalisation(self, rows: int, columns: int) -> Case:
        x, weight, bias = self._tensor(rows, columns), self._tensor(columns), self._tensor(columns)
        normal = (x, [columns], weight, bias, 1e-5)
        _, mean, deviation = aten.native_layer_norm.default(*normal)
        soft = aten._softmax.default(x, -1, False)
        backward = (x, x, [columns], mean, deviation, weight, bias, [True, True, True])
        calls = (
            _called("layer_norm", aten.native_layer_norm.default, *normal),
            _called("layer_norm I", aten.native_layer_norm_backward.default, *backward),
            _called("softmax", aten._softmax.default, x, -1, False),
            _called("softmax I", aten._softmax_backward_data.default, x, soft, -1, self.dtype),
            _called("mean", aten.mean.dim, x, [-1]),
        )
        return Case(f"rows {rows}×{columns}", dict(calls))

    def elementwise(self, count: int) -> Case:
        x, y = self._tensor(count), self._tensor(count)
        calls = (
            _called("add", aten.add.Tensor, x, y),
            _called("mul", aten.mul.Tensor, x, y),
            _called("add_", aten.add_.Tensor, x.clone(), y),
            _called("copy", aten.clone.default, x),
            _called("gelu", aten.gelu.default, x),
            _called("gelu I", aten.gelu_backward.default, x, y),
            _called("silu", aten.silu.default, x),
        )
        return Case(f"elements {count}", dict(calls))

    def lookup(self, rows: int, table: int, columns: int) -> Case:
        weight, gradient = self._tensor(table, columns), self._tensor(rows, columns)
        places = (torch.arange(rows, device=self.device) * 7919) % table
        calls = (
            _called("embedding", aten.embedding.default, weight, places),
            _called("embedding W", aten.embedding_dense_backward.default, gradient, places, table, -1, False),
            _called("index_select", aten.index_select.default, weight, 0, places),
        )
        return Case(f"lookup {rows} of {table}×{columns}", dict(calls))


def _called(name: str, target: Any, *args: Any) -> tuple[str, tuple[Callable[[], Any], Kernel]]:
    """A call by name. It cycles through copies of its operands, so that caches do not hold them, as in a step."""
    kernel = kernel_of(target, args, {}, target(*args))
    assert kernel is not None  # none of them is a view
    size = max(1, sum(t.untyped_storage().nbytes() for t in args if isinstance(t, Tensor)))
    on_gpu = any(isinstance(t, Tensor) and t.is_cuda for t in args)
    copies = max(1, min(MOST_COPIES, (GPU_CACHES if on_gpu else HOST_CACHES) // size))
    operands = itertools.cycle([args, *(_copied(args) for _ in range(copies - 1))])
    return name, (lambda: target(*next(operands)), kernel)


def _copied(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)


def model_samples(work: ModelWork, measured: OpGraph) -> list[Sample]:
    """One sample each of F, I and W for all operators that do the same work, with the median of their times."""
    times: Mapping[int, list[tuple[str, tuple[float, ...]]]] = defaultdict(list)
    kernels: dict[int, tuple[tuple[str, tuple[Kernel, ...]], ...]] = {}
    for node, operator in zip(measured.nodes, work.operators, strict=True):
        own = operator.work
        kernels[id(own)] = ("F", own.forward), ("I", own.backward_input), ("W", own.backward_weight)
        times[id(own)].append((node.name, (node.forward_s, node.backward_input_s, node.backward_weight_s)))
    samples = []
    for key, parts in kernels.items():
        name = times[key][0][0]
        for position, (part, found) in enumerate(parts):
            seconds = statistics.median(each[position] for _, each in times[key])
            if found and seconds > 0:
                samples.append(Sample(f"{name} {part}", name, found, seconds))
    return samples
