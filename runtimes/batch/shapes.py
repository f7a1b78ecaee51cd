"""The programs of every shape of microbatch; the most recently used ones are kept.

A plan is made for the example's shape. For another shape the step is captured again, with the same cut. All ranks have
the same batches, so they capture, keep and evict the same shapes without communication. If shapes are new to a rank, it
first compares its batch with the others: with different batches it would wait forever. Compiling can fail on one rank
alone, for its stages; then all ranks fail, because they would wait for it in the step.

The first batch is captured with its sizes. At the second one, the dimensions that differ (`VaryingSizes`) become
symbols, and the step is captured once more; from then on a new size costs no capture: the programs get numbers in place
of symbols. What the user declares (``dynamic=``) has symbols from the start. A step that decides by a size, such as
``if length > 128``, has guards, and is captured again for sizes beyond them.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from attrs import define, field, frozen

from ...core.capture.export.captured_step import CapturedStep
from ...core.capture.export.carry_over import Cut, carry_over
from ...core.capture.export.operators import Operators, operators_of
from ...core.capture.export.step import symbolic_sizes
from ...core.capture.graph.outputs import parts_in_words
from ...core.capture.values.capture_errors import Refused, error_of_type
from ...core.capture.values.user_lines import reason_of, user_line
from ...core.errors import RequestError, in_a_line
from ...core.garbage import rare_collections
from ..launch.progress import NOTICED_S, Report, reported_if_slow, silent
from ..launch.team import Team
from ..microbatches import Microbatch, Shape
from ..programs.compiled import Compiled, ProgramCompiler, compile_stages
from .lru_cache import LruCache

_INNER = 2
"""The first dimension after those of samples, and of tokens or channels."""
Dims = Mapping[int, Sequence[int]]
"""Position of a tensor among the batch's leaves → some of its dimensions."""


@frozen
class Captures:
    """Captures of a function with symbolic sizes, for batches that differ only in sizes; valid for every plan."""

    steps: list[Operators] = field(factory=list)
    failures: list[str] = field(factory=list)


def structure_of(shape: Shape) -> Hashable:
    """What shapes have in common that differ only in sizes: dtypes, numbers of dimensions, and plain values."""
    leaves = (((len(leaf[0]), leaf[1]) if isinstance(leaf, tuple) else leaf) for leaf in shape.leaves)
    return shape.nesting, shape.dims, tuple(leaves)


def sizes_of(shape: Shape) -> dict[int, tuple[int, ...]]:
    """Position of each tensor among the batch's leaves → its shape."""
    return {i: leaf[0] for i, leaf in enumerate(shape.leaves) if isinstance(leaf, tuple)}


@define
class VaryingSizes:
    """The dimensions whose sizes differ between batches, by structure.

    Args:
        declared: name of a tensor → dimension → its largest size; None for any.

    Attributes:
        capture_s: seconds of all captures, and of all derivations of programs with symbolic sizes.
    """

    declared: Mapping[str, Mapping[int, int | None]] = field(factory=dict)
    capture_s: float = 0.0
    _first: dict[Hashable, dict[int, tuple[int, ...]]] = field(factory=dict)
    _dims: dict[Hashable, set[tuple[int, int]]] = field(factory=dict)
    _captures: dict[Hashable, Captures] = field(factory=dict)

    def note(self, shape: Shape) -> None:
        """Note the sizes of a microbatch.

        Raises:
            RequestError: a size is larger than declared.
        """
        structure, sizes = structure_of(shape), sizes_of(shape)
        for leaf, name in enumerate(shape.nesting.names):
            for dim, most in self.declared.get(name, {}).items():
                if most is not None and leaf in sizes and sizes[leaf][dim] > most:
                    raise RequestError(
                        f"{name} has {sizes[leaf][dim]} entries in dimension {dim}, and dynamic= declares at most "
                        f"{most}, for which memory is planned: truncate the batch, or declare a larger size"
                    )
        first, found = self._first.setdefault(structure, sizes), self._dims.setdefault(structure, set())
        for leaf, own in sizes.items():
            other = {dim for dim, size in enumerate(own) if size != first[leaf][dim]}
            if any(dim >= _INNER for dim in other):  # the width of pictures probably varies, too, if the height does
                other.update(range(_INNER, len(own)))
            found.update((leaf, dim) for dim in other)

    def of(self, shape: Shape) -> Dims:
        """The dimensions of a microbatch that become symbols; a symbol is at least 2."""
        found: dict[int, list[int]] = {}
        sizes, names = sizes_of(shape), shape.nesting.names
        declared = {(leaf, dim) for leaf in sizes for dim in self.declared.get(names[leaf], ())}
        for leaf, dim in sorted(declared.union(self._dims.get(structure_of(shape), ()))):
            if sizes[leaf][dim] > 1:
                found.setdefault(leaf, []).append(dim)
        return found

    def captures(self, function: Hashable, shape: Shape) -> Captures:
        """The captures of a function with symbolic sizes for batches with the structure of this one.

        Args:
            function: what is captured: the function, the Python values that it reads, and the modes of its modules.
        """
        return self._captures.setdefault((function, structure_of(shape)), Captures())


Capture = Callable[[Any, Shape, Dims | None], CapturedStep]
"""Captures the step for a microbatch of this shape, with symbols for the sizes of these dimensions."""

_KEPT = 8
"""Number of captured shapes whose programs are kept; more if a single step has more. If programs are compiled, those of
further sizes are not, as ``torch.compile`` does after this many recompilations."""
_SIZED = 64
"""Number of shapes whose programs are kept, of those that programs with symbolic sizes give within milliseconds."""
_MOST_FAILURES = 2
"""Number of failed captures with symbolic sizes after which there are no more; one size may be special: the largest."""
_MOST_SYMBOLIC = 4
"""Largest number of symbolic captures of batches that differ only in sizes: a step may decide by a size."""


class Shapes:
    """Programs by shape of microbatch.

    Args:
        function: a key of what is captured: the function, the Python values that it reads, the modes of its modules.
        report: called with what is captured, if it takes long.
    """

    def __init__(
        self,
        capture: Capture,
        team: Team,
        cut: Cut,
        where: Mapping[int, torch.device],
        compiler: ProgramCompiler | None = None,
        varying: VaryingSizes | None = None,
        function: Hashable = None,
        report: Report = silent,
    ) -> None:
        self._capture, self._team, self._cut, self._where = capture, team, cut, where
        self._compiler, self._report = compiler, report
        self._parts: str | None = None
        self._kept: LruCache[Shape, Compiled] = LruCache(_KEPT)
        self._sized: LruCache[Shape, Compiled] = LruCache(_SIZED)
        self.varying = VaryingSizes() if varying is None else varying
        self._function = function
        self._symbolic: dict[int, Compiled | str] = {}
        self._latest: Compiled | None = None
        self._example: Shape | None = None
        self.captures, self.capture_s = 0, 0.0
        self._reported: set[Shape | str] = set()
        self._reported_limit = False

    def keep(self, shape: Shape, compiled: Compiled) -> None:
        """Add the programs of the example, which are already compiled."""
        self._kept.keep(shape, compiled)
        self.varying.note(shape)
        if compiled.operators.symbolic is not None:
            symbolic, _ = compiled.operators.symbolic
            steps = self.varying.captures(self._function, shape).steps
            steps += [symbolic] if not steps else []
            if compiled.symbolic is not None:
                self._symbolic[id(symbolic)] = compiled.symbolic
        self._example, self._latest, self._parts = shape, compiled, parts_in_words(compiled.operators.step.outputs)
        self._reported.add(shape)

    @property
    def latest(self) -> Compiled:
        """The programs of the most recently used shape."""
        assert self._latest is not None
        return self._latest

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._kept or shape in self._sized

    def programs_for(self, pieces: Sequence[Microbatch]) -> tuple[list[Compiled], str | None]:
        """Programs for microbatches.

        Args:
            pieces: the microbatches, larger ones first.

        Returns:
            The programs for each of them, and a line for the user if a shape is new, except for the first one.

        Raises:
            RequestError: the step cannot be captured for one of the shapes, or the plan cannot run it.
        """
        remark = None
        wanted = {piece.shape: piece for piece in pieces}
        found = {shape: self._kept.use(shape) or self._sized.use(shape) for shape in wanted}
        for shape in wanted:
            self.varying.note(shape)
        for shape, piece in wanted.items():
            if found[shape] is None:
                captures = self.captures
                found[shape] = made = self._with_sizes(piece)
                if made is not None:
                    self._sized.keep(shape, made, wanted)
                    remark = self._remark(shape, self._compiler is not None) if self.captures > captures else remark
                    continue
                found[shape] = made = self._agreed(partial(self._compile_new, piece))
                full = self._kept.keep(shape, made, wanted)
                remark = self._remark(shape, full) or remark
        compiled = {shape: known for shape, known in found.items() if known is not None}
        self._latest = compiled[pieces[0].shape]
        return [compiled[piece.shape] for piece in pieces], remark

    def _with_sizes(self, piece: Microbatch) -> Compiled | None:
        """Programs from a capture with symbolic sizes, which may be made now; None if there is none, on any rank."""
        if self._compiler is not None and len(self._kept) < _KEPT:
            return None
        shape = piece.shape
        known = self.varying.captures(self._function, shape)
        for operators in known.steps:
            found = self._sized_programs(operators, shape)
            if self._everywhere(found is not None):
                return found
        dims = self.varying.of(shape)
        if not dims or len(known.failures) == _MOST_FAILURES or len(known.steps) == _MOST_SYMBOLIC:
            return None
        found, reason = None, "the step fixes them, as a loop over a sequence does"
        try:
            with self._counted(shape), symbolic_sizes(self._team.tensors.divided):
                operators = operators_of(self._captured(piece, dims))
            found = self._sized_programs(operators, shape)
            failure = self._symbolic.get(id(operators))
            reason = failure if isinstance(failure, str) else reason
        except Exception as error:  # the capture with numbers raises the user's
            reason = reason_of(error)
        if not self._everywhere(found is not None):
            known.failures.append(reason)
            return None
        known.steps.append(operators)
        return found

    def _sized_programs(self, operators: Operators, shape: Shape) -> Compiled | None:
        """The programs of a capture with symbolic sizes for a shape; None if it is not valid for it."""
        symbols = operators.step.sizes
        if symbols is None or symbols.fixed or symbols.values(sizes_of(shape)) is None:
            return None
        if id(operators) not in self._symbolic:
            try:
                with self._counted(shape, 0), symbolic_sizes(symbols.of_parts):
                    self._symbolic[id(operators)] = self._compile(operators, shape, None)
            except Exception as error:  # the programs of a capture with numbers raise the user's
                self._symbolic[id(operators)] = reason_of(error)
        made, sizes = self._symbolic[id(operators)], symbols.values(sizes_of(shape))  # deriving programs adds guards
        return None if sizes is None or isinstance(made, str) else made.with_sizes(sizes)

    def _everywhere(self, here: bool) -> bool:
        """Whether something holds on every rank of the replica."""
        return here if len(self._team.local) == self._team.size else all(self._team.in_replica(lambda _: here))

    @contextmanager
    def _counted(self, shape: Shape, captures: int = 1) -> Iterator[None]:
        """Count captures, and the seconds that they take."""
        started = time.perf_counter()
        with rare_collections(), reported_if_slow(self._report, f"capturing for microbatches of {shape}"):
            yield
        self.captures += captures
        seconds = time.perf_counter() - started
        self.capture_s, self.varying.capture_s = self.capture_s + seconds, self.varying.capture_s + seconds

    def _compile_new(self, piece: Microbatch) -> Compiled:
        with self._counted(piece.shape):
            return self._compile(operators_of(self._captured(piece)), piece.shape, self._compiler)

    def _compile(self, captured: Operators, shape: Shape, compiler: ProgramCompiler | None) -> Compiled:
        operators, stages = carry_over(self._cut, captured)
        parts = parts_in_words(operators.step.outputs)
        self._parts = self._parts or parts
        if parts != self._parts:
            raise RequestError(
                f"the step returns {parts} for microbatches of {shape} and {self._parts} for the example: return the "
                "same parts for every shape"
            )
        return compile_stages(operators, stages, self._where, self._where, compiler, may_be_empty=True)

    def _captured(self, piece: Microbatch, dims: Dims | None = None) -> CapturedStep:
        """The step for a microbatch; an error begins with the batch's first difference from the example."""
        try:
            return self._capture(piece.batch, piece.shape, dims)
        except RequestError as error:
            other = None if self._example is None else self._example.difference(piece.shape)
            if other is None:
                raise
            cause = error.__cause__
            if cause is None or error_of_type(Refused, cause) is not None:
                raise RequestError(f"{other}: {error}") from None
            # The advice to change the step's line would be wrong: it is the batch. The cause has hundreds of lines.
            raise RequestError(f"{other}; with it the step fails: {user_line(cause)}: {reason_of(cause)}") from None

    def _agreed(self, make: Callable[[], Compiled]) -> Compiled:
        """What ``make`` returns. If it fails on one rank of the replica, it fails on all of them."""
        if len(self._team.local) == self._team.size:
            return make()
        made, failure = None, None
        try:
            made = make()
        except Exception as error:
            failure = error
        # Other replicas have other batches and shapes.
        reasons = self._team.in_replica(lambda _: None if failure is None else in_a_line(failure))
        if failure is not None:
            raise failure
        other = next((device for device, text in enumerate(reasons) if text is not None), None)
        if other is not None:
            rank = self._team.rank(self._team.replica * self._team.size + other)
            raise RequestError(f"rank {rank} cannot compile the step for this batch: {reasons[other]}")
        assert made is not None
        return made

    def _remark(self, shape: Shape, full: bool) -> str | None:
        first = not self._reported
        if self._reported_limit or (shape in self._reported and not full):
            return None
        self._reported.add(shape)
        if first:
            return None
        each_s = self.capture_s / self.captures
        other = None if self._example is None else self._example.other_value(shape)
        if other is not None:
            return self._remark_value(*other, each_s)
        self._reported_limit = full
        if full:
            kept = f"batches keep changing shape: programs for {self._kept.limit} shapes of microbatches are "
            rest = f"kept, and capturing the step for one more takes {each_s:.1f} s each time"
            if self._compiler is not None and self._sized:
                rest = "compiled, and those of further shapes run without compilation"
            return f"{kept}{rest}: pad batches to a few lengths"
        failures = self.varying.captures(self._function, shape).failures[-1:]
        again, new = "", not self._reported.issuperset(failures)
        if new:
            again = f"; it is captured again for further sizes, because they cannot be symbols: {failures[0]}"
            self._reported.update(failures)
        if each_s < NOTICED_S and not new:
            return None
        return f"microbatches of a new shape ({shape}): capturing the step for them took {each_s:.1f} s{again}"

    def _remark_value(self, name: str, value: Any, example: Any, each_s: float) -> str | None:
        """The line for a value that is no tensor and is not the example's, once for each leaf.

        Args:
            each_s: seconds of a capture.
        """
        if name in self._reported:
            return None
        self._reported.add(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fix = f": if it changes often, give it as a tensor, torch.tensor({value!r})" if number else ""
        return (
            f"{name} is {value!r}, and {example!r} in the example: the step is captured again for each new value, "
            f"which took {each_s:.1f} s, and programs for {self._kept.limit} shapes and values are kept{fix}"
        )
