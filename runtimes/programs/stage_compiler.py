"""Compiles parts of stage programs with Inductor or another backend of ``torch.compile``.

It compiles sections of programs, whole layers with the sums of their gradients (`sections`). Equal sections of any
program, stage or cut are compiled once. A section that the backend cannot compile, or compiles to other results, runs
without compilation, and a warning reports it. Those programs of a stage are compiled that a plan runs; another one is
compiled if it is called nevertheless.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, fx

from ...core.actions import Kind
from ...core.capture.graph.generated_sources import sources_removed
from ...core.capture.programs.accumulated_products import accumulate_product
from ...core.capture.programs.generated_code import Program, section_in_parts
from ...core.capture.programs.programs import stage_programs
from ...core.capture.programs.sections import Call, Fusion
from ...core.capture.programs.stage import StageGraph
from ...core.capture.programs.stage_programs import StagePrograms
from ...core.errors import warn_caller
from ...core.plan.plan import Plan
from ...core.tensor_metadata import storage_of
from ..launch.progress import Report, silent
from ..watch.activity import HERE
from .compiled import ProgramCompiler, Programs
from .compiler_choice import Boxed, CompilerChoice


@define(eq=False)
class StageCompiler:
    """Compiles sections of programs, each once.

    Attributes:
        calls: signature of a section → its function.
        failures: signature of a section that runs without compilation → the reason.
    """

    choice: CompilerChoice
    calls: dict[str, Call] = field(factory=dict)
    failures: dict[str, str] = field(factory=dict)
    _warned: set[str] = field(factory=set)

    def programs(
        self, stage: StageGraph, index: int, now: Callable[[StagePrograms], Collection[Program]] | None = None
    ) -> StagePrograms:
        """The compiled programs of a stage; warns of sections that do not compile.

        Args:
            index: its number, for messages.
            now: those that are compiled now, and not when they are first called; by default all.
        """
        failed: dict[str, Fusion] = {}

        def call_of(fusion: Fusion) -> Call:
            graph = fusion.graph()
            key = signature(graph)
            if key not in self.calls and key not in self.failures:
                with sources_removed():
                    self._compile(fusion, key, graph)
            if key not in self.failures:
                return _guarded(self.calls[key], in_parts(fusion), self.choice.name)
            failed[key] = fusion
            return in_parts(fusion)

        ready = False

        def compiled(fusion: Fusion) -> Call:
            call = call_of(fusion)
            if ready and failed:
                self._warn(index, failed)
            return call

        found = stage_programs(stage, compiled, now)
        if failed:
            self._warn(index, failed)
        ready = True
        return found

    def _compile(self, fusion: Fusion, key: str, graph: fx.Graph) -> None:
        """Call the backend, and check its function with one call, which also loads what the first call loads."""
        HERE.doing("a compilation")
        given = [_example(node.meta["val"]) for node in graph.find_nodes(op="placeholder")]
        again = [_example(node.meta["val"]) for node in graph.find_nodes(op="placeholder")]
        try:
            with torch.no_grad():
                compiled = self.choice.compile(fx.GraphModule({}, graph), list(given))
                call = compiled.function if isinstance(compiled, Boxed) else _unboxed(compiled)
                results, expected = call(list(given)), in_parts(fusion)(list(again))
                _check(given, results, expected)
                _check_sums(fusion, given, again)
        except Exception as error:
            self.failures[key] = str(error).strip().partition("\n")[0] or type(error).__name__
        else:
            self.calls[key] = call

    def _warn(self, stage: int, failed: dict[str, Fusion]) -> None:
        """Warn once of what runs without compilation."""
        key, fusion = next(iter(failed.items()))
        names = ", ".join(dict.fromkeys(str(node.target) for node in fusion.nodes if node.op == "call_function"))
        names = names if len(names) < 100 else f"{names[:100]}…"
        more = f" and {len(failed) - 1} more sections" if len(failed) > 1 else ""
        line = f"stage {stage} runs {names}{more} without compilation: {self.choice.name} fails for them: "
        line += self.failures[key]
        if line not in self._warned:
            self._warned.add(line)
            warn_caller(line)


def in_parts(fusion: Fusion) -> Call:
    """A section that runs operator by operator."""
    program = section_in_parts(fusion)
    count, sums = len(fusion.inputs), len(fusion.sums)

    def call(given: list[Any]) -> Sequence[Tensor]:
        inputs, totals = given[:count], given[count : count + sums]
        given.clear()
        return program(inputs, _Totals(totals))

    return call


@frozen
class _Totals:
    """A sink that adds to tensors.

    Args:
        values: by number.
    """

    values: list[Tensor]

    def add(self, number: int, value: Tensor) -> None:
        self.values[number].add_(value)

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        accumulate_product(self.values[number], left, right)

    def totals(self, numbers: Sequence[int]) -> list[Tensor]:
        return [self.values[number] for number in numbers]

    def added(self, numbers: Sequence[int]) -> None:
        pass


def _unboxed(function: Callable[..., Any]) -> Call:
    return lambda given: function(*given)


def signature(graph: fx.Graph) -> str:
    """A text that identifies equal groups: operators, arguments and the memory layout of inputs, without node names."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    inputs = (node.meta["val"] for node in graph.find_nodes(op="placeholder"))
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
    """A real tensor like a fake one: numbers between 1/2 and 1, or zeros for integers, which may be indices."""
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if not value.is_floating_point():
        return tensor.zero_()
    return tensor.uniform_(0.5, 1, generator=torch.Generator(value.device).manual_seed(0))


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


def _check_sums(fusion: Fusion, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Refuse sums that differ much from those of the group without compilation, which mostly were not written."""
    first = len(fusion.inputs)
    for one, other in zip(found[first:][: len(fusion.sums)], expected[first:], strict=False):
        if not torch.allclose(one.float(), other.float(), rtol=0.1, atol=0.1 * float(other.float().abs().max()) + 1e-3):
            raise ValueError("what it adds to the gradients of parameters differs")


def _layout(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}, on {tensor.device}"


def _guarded(compiled: Call, plain: Call, name: str) -> Call:
    """The compiled function; for inputs with other strides than when it was traced, the group without compilation.

    Inductor checks strides before it computes anything. The data of a parameter may get other strides.
    """
    warned = False

    def call(given: list[Any]) -> Sequence[Tensor]:
        nonlocal warned
        kept = list(given)
        try:
            return compiled(given)
        except AssertionError as error:
            if not warned:
                warned = True
                why = str(error).partition("\n")[0]
                warn_caller(
                    f"some operators run without compilation: what {name} compiled is for other strides: {why}",
                )
            return plain(kept)

    return call


def planned_compiler(compiler: StageCompiler | None, *plans: Plan) -> ProgramCompiler | None:
    """Compiles what some plans of the same stages run; None without compilation."""
    if compiler is None:
        return None
    kinds: dict[int, set[Kind]] = {}
    for actions in (actions for plan in plans for actions in plan.device_actions):
        for action in actions:
            kinds.setdefault(action.stage, set()).add(action.kind)

    def programs(stage: StageGraph, index: int) -> StagePrograms:
        own, again = kinds.get(index, ()), index in plans[0].memory.recompute
        return compiler.programs(stage, index, lambda found: programs_run(found, own, again))

    return programs


def programs_run(programs: StagePrograms, kinds: Collection[Kind], again: bool) -> list[Program]:
    """The programs that actions of some kinds run.

    Args:
        again: whether the stage recomputes its forward.
    """
    backward = any(kind is not Kind.F for kind in kinds)
    found = [programs.forward_alone if again else programs.forward]
    found += [programs.recompute.run] if again and backward else []
    first, second = programs.backward_input, programs.backward_weight
    split = first is not None and second is not None and Kind.I in kinds
    if programs.backward is not None and (Kind.B in kinds or (backward and not split)):
        found.append(programs.backward.run)
    if first is not None and second is not None and split:
        found += [first.run, second.run]
    return found


@frozen
class ProgramOptions:
    """How the programs of stages are derived.

    Args:
        compiler: compiles sections of programs; None to run operators one by one.
        graphs: whether they are captured as CUDA graphs.
        plans: further plans of the same stages that the programs are compiled for.
        known: programs of the example, which are reused; new ones are added.
        report: called with what is captured after planning, if it takes long.
    """

    compiler: StageCompiler | None = None
    graphs: bool = False
    plans: tuple[Plan, ...] = ()
    known: Programs = field(factory=dict)
    report: Report = silent
