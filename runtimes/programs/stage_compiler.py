"""Compiles parts of stage programs with Inductor or another backend of ``torch.compile``.

It compiles groups of operators between matrix products, attention and other large kernels (`fusing`). Equal groups of
any layer, program, stage or cut are compiled once. A group that the backend cannot compile, or compiles to other
results, runs without compilation, with a warning.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, fx

from ...core.capture.graph.generated_sources import sources_removed
from ...core.capture.graph.storages import storage_of
from ...core.capture.programs.fusing import Call, Fusion
from ...core.capture.programs.programs import stage_programs
from ...core.capture.programs.stage import StageGraph
from ...core.capture.programs.stage_programs import StagePrograms
from ...core.errors import RequestError
from ..watch.activity import HERE

Compile = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""A backend of ``torch.compile``: takes a graph and example inputs, and returns a function of such inputs."""

INDUCTOR = "inductor"
_OURS = "panpipe"


@frozen
class CompilerChoice:
    """The user's choice of a backend.

    Args:
        name: of the backend, for messages.
        compile: the backend.
    """

    name: str
    compile: Compile

    @classmethod
    def of(cls, wanted: "str | Compile | None") -> "CompilerChoice | None":
        """The choice for the user's ``compile=``.

        Raises:
            RequestError: it names no backend of ``torch.compile``, or is neither a name nor a function.
        """
        if wanted is None:
            return None
        if callable(wanted):
            return cls(getattr(wanted, "__name__", type(wanted).__name__), wanted)
        from torch._dynamo.backends.registry import list_backends, lookup_backend

        known = sorted(set(list_backends(exclude_tags=())) - {_OURS})
        if not isinstance(wanted, str) or wanted not in known:
            usual = ", ".join(name for name in sorted(list_backends()) if name != _OURS)
            raise RequestError(
                f"compile is {wanted!r}: it names a backend of torch.compile, or is a function of a graph and example "
                f"inputs; known are {usual}"
            )
        return cls(wanted, _inductor(1) if wanted == INDUCTOR else lookup_backend(wanted))

    def check(self, device_type: str) -> None:
        """Refuse Inductor if a program that it needs is missing.

        Args:
            device_type: of the devices that stages are compiled for.

        Raises:
            RequestError: there is no C++ compiler, or for GPUs no Triton.
        """
        if self.name != INDUCTOR:
            return
        if device_type == "cuda":
            from torch.utils._triton import has_triton

            if not has_triton():
                raise RequestError(
                    "compile='inductor' needs Triton for GPUs and PyTorch finds none that works here: pip install "
                    "triton, or leave compile out"
                )
            return
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            raise RequestError(
                "compile='inductor' needs a C++ compiler and none is found here: install g++, name another one in the "
                "environment variable CXX, or leave compile out"
            ) from error

    def with_threads(self, threads: int) -> "CompilerChoice":
        """The same choice, for programs that run on this many threads each."""
        return CompilerChoice(self.name, _inductor(threads)) if self.name == INDUCTOR else self


def _inductor(threads: int) -> Compile:
    def compile_graph(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        from torch import _inductor

        # Loops are split for the threads of a stage. No compile pool: its processes would outlive a killed rank.
        options = {"cpp.threads": threads, "compile_threads": 1}
        try:
            found: Callable[..., Any] = _inductor.compile(graph, examples, options)  # type: ignore[arg-type]
        except UnicodeDecodeError as error:  # Inductor reads its own templates in the locale's encoding
            raise RequestError(
                f"compile='inductor' needs UTF-8 as the encoding of files and this locale has {error.encoding}: set "
                "PYTHONUTF8=1 or LC_ALL=C.UTF-8, or leave compile out"
            ) from error
        return found

    return compile_graph


@define(eq=False)
class StageCompiler:
    """Compiles groups of operators, each once.

    Args:
        choice: of the backend.

    Attributes:
        calls: signature of a group → its function.
        failures: signature of a group that runs without compilation → the reason.
    """

    choice: CompilerChoice
    calls: dict[str, Call] = field(factory=dict)
    failures: dict[str, str] = field(factory=dict)
    _warned: set[str] = field(factory=set)

    def programs(self, stage: StageGraph, index: int) -> StagePrograms:
        """The compiled programs of a stage; warns of groups that do not compile.

        Args:
            stage: its graph.
            index: its number, for messages.
        """
        failed: dict[str, Fusion] = {}

        def call_of(fusion: Fusion) -> Call:
            graph = fusion.graph()
            key = signature(fusion, graph)
            if key not in self.calls:
                with sources_removed():
                    self.calls[key] = self._compiled(fusion, key, fx.GraphModule({}, graph))
            if key in self.failures:
                failed[key] = fusion
            return self.calls[key]

        found = stage_programs(stage, call_of)
        if failed:
            self._warn(index, failed)
        return found

    def _compiled(self, fusion: Fusion, key: str, module: fx.GraphModule) -> Call:
        """The backend's function, checked with one call, which also loads what the first call loads."""
        HERE.doing("a compilation")
        examples = [_example(node.meta["val"]) for node in fusion.inputs]
        try:
            with torch.no_grad():
                compiled = self.choice.compile(module, list(examples))
                results, expected = compiled(*examples), module.forward(*examples)
            _check(examples, results, expected)
        except Exception as error:
            self.failures[key] = str(error).strip().partition("\n")[0] or type(error).__name__
            return module.forward
        return _guarded(compiled, module.forward, self.choice.name)

    def _warn(self, stage: int, failed: dict[str, Fusion]) -> None:
        key, fusion = next(iter(failed.items()))
        names = ", ".join(dict.fromkeys(str(node.target) for node in fusion.nodes if node.op == "call_function"))
        shown = names if len(names) < 100 else f"{names[:100]}…"
        more = f" and {len(failed) - 1} more groups of operators" if len(failed) > 1 else ""
        line = f"stage {stage} runs {shown}{more} without compilation: {self.choice.name} fails for them: "
        line += self.failures[key]
        if line not in self._warned:
            self._warned.add(line)
            warnings.warn(line, stacklevel=2)


def signature(fusion: Fusion, graph: fx.Graph) -> str:
    """A text that identifies equal groups: operators, arguments and the memory layout of inputs, without node names.

    Args:
        fusion: the group.
        graph: the graph of the group alone.
    """
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    inputs = (node.meta["val"] for node in fusion.inputs)
    lines = [f"{v.dtype} {tuple(v.shape)} {v.stride()} {v.device}" for v in inputs]
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda n: _Name(number[n]))
        lines.append(f"{number[node]} {node.op if node.op != 'call_function' else node.target} {args}")
    return "\n".join(lines)


class _Name(str):
    """The number of a node, printed without quotes, so that it differs from every constant."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _example(value: Tensor) -> Tensor:
    """A real tensor like a fake one: ones, or zeros for integers, which may be indices."""
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return tensor.fill_(1 if value.is_floating_point() else 0)


def _check(inputs: Sequence[Tensor], results: Any, expected: Sequence[Tensor]) -> None:
    """Refuse results whose number, type or memory layout differs from those of the group without compilation."""
    found = list(results) if isinstance(results, list | tuple) else [results]
    if len(found) != len(expected):
        raise ValueError(f"it returns {len(found)} tensors and not {len(expected)}")
    for one, other in zip(found, expected, strict=True):
        if not isinstance(one, Tensor) or _layout(one) != _layout(other):
            what = _layout(one) if isinstance(one, Tensor) else type(one).__name__
            raise ValueError(f"it returns {what} and not {_layout(other)}")
    storages = [storage_of(tensor) for tensor in (*inputs, *found)]
    if len(set(storages)) < len(storages):
        raise ValueError("what it returns shares memory with what it is given, or with another result")


def _layout(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}, on {tensor.device}"


def _guarded(compiled: Callable[..., Any], plain: Call, name: str) -> Call:
    """The compiled function; for inputs with other strides than when it was traced, the group without compilation.

    Inductor checks strides before it computes anything. Batches may have other strides than the example.
    """
    warned = False

    def call(*inputs: Tensor) -> Sequence[Tensor]:
        nonlocal warned
        try:
            return compiled(*inputs)  # type: ignore[no-any-return]
        except AssertionError as error:
            if not warned:
                warned = True
                why = str(error).partition("\n")[0]
                warnings.warn(
                    f"some operators run without compilation: what {name} compiled is for other strides: {why}",
                    stacklevel=2,
                )
            return plain(*inputs)

    return call
