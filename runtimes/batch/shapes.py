"""The programs of every shape of microbatch; the most recently used ones are kept.

A plan is made for the example's shape. For another shape the step is captured again, with the same cut. All ranks have
the same batches, so they capture, keep and evict the same shapes without communication. If shapes are new to a rank, it
first compares its batch with the others: with different batches it would wait forever. Compiling can fail on one rank
alone, for its stages; then all ranks fail, because they would wait for it in the step.
"""

import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...core.capture.export.captured_step import CapturedStep
from ...core.capture.export.carry_over import Cut, carry_over
from ...core.capture.export.operators import operators_of
from ...core.capture.export.step import quiet_torch
from ...core.capture.graph.outputs import parts_in_words
from ...core.capture.values.capture_errors import Refused, error_of_type
from ...core.capture.values.user_lines import reason_of, user_line
from ...core.errors import RequestError, in_a_line
from ..launch.team import Team
from ..programs.compiled import Compiled, ProgramCompiler, compile_possibly_empty
from ..programs.options import check_max_shapes
from .lru_cache import LruCache
from .microbatches import Microbatch, Shape
from .varying_sizes import Dims, SymbolicPrograms, VaryingSizes, structure_of

_NOTICED_S = 2.0
"""Seconds of a capture from which on a new shape is reported."""
Capture = Callable[[Any, Shape, Dims | None], CapturedStep]
"""Captures the step for a microbatch of this shape, with symbols for the sizes of these dimensions."""

_SIZED = 64
"""Number of shapes whose programs are kept, of those that programs with symbolic sizes give within milliseconds."""
_MOST_FAILURES = 2
"""Number of failed captures with symbolic sizes after which there are no more; one size may be special: the largest."""
_MOST_SYMBOLIC = 4
"""Largest number of symbolic captures of batches that differ only in sizes: a step may decide by a size."""


class Shapes:
    """Programs by shape of microbatch.

    Args:
        capture: captures the step for a microbatch of a shape.
        team: the devices.
        cut: the plan's.
        where: local stage → its device.
        limit: how many captured shapes are kept; more if a single step has more.
        compiler: compiles the graphs of stage programs.
        varying: the sizes that differ between batches.
    """

    def __init__(
        self,
        capture: Capture,
        team: Team,
        cut: Cut,
        where: Mapping[int, torch.device],
        limit: int,
        compiler: ProgramCompiler | None = None,
        varying: VaryingSizes | None = None,
    ) -> None:
        check_max_shapes(limit)
        self._capture, self._team, self._cut, self._where = capture, team, cut, where
        self._compiler = compiler
        self._parts: str | None = None
        self._kept: LruCache[Shape, Compiled] = LruCache(limit)
        self._sized: LruCache[Shape, Compiled] = LruCache(_SIZED)
        self._varying = VaryingSizes() if varying is None else varying
        self._symbolic: list[SymbolicPrograms] = []
        self._not_symbolic: dict[Hashable, list[str]] = {}
        self._latest: Compiled | None = None
        self._example: Shape | None = None
        self.captures, self._capture_s = 0, 0.0
        self._reported: set[Shape | str] = set()
        self._reported_limit = False

    def keep(self, shape: Shape, compiled: Compiled) -> None:
        """Add the programs of the example, which are already compiled."""
        self._kept.keep(shape, compiled)
        self._varying.note(shape)
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
            self._varying.note(shape)
        for shape, piece in wanted.items():
            if found[shape] is None:
                captures = self.captures
                found[shape] = made = self._with_sizes(piece)
                if made is not None:
                    self._sized.keep(shape, made, wanted)
                    remark = self._remark(shape, False) if self.captures > captures else remark
                    continue
                found[shape] = made = self._agreed(partial(self._compile, piece))
                full = self._kept.keep(shape, made, wanted)
                remark = self._remark(shape, full) or remark
        compiled = {shape: known for shape, known in found.items() if known is not None}
        self._latest = compiled[pieces[0].shape]
        return [compiled[piece.shape] for piece in pieces], remark

    def _with_sizes(self, piece: Microbatch) -> Compiled | None:
        """Programs from a capture with symbolic sizes, which may be made now; None if there is none, on any rank."""
        shape, structure = piece.shape, structure_of(piece.shape)
        same = [each for each in self._symbolic if each.structure == structure]
        sized = [each.at(shape) for each in same]
        valid = self._everywhere([each is not None for each in sized]) if same else []
        if any(valid):
            return sized[valid.index(True)]
        dims = self._varying.of(shape)
        reasons = self._not_symbolic.setdefault(structure, [])
        possible = self._compiler is None and self._team.tensor is None and len(reasons) < _MOST_FAILURES
        if not dims or not possible or len(same) == _MOST_SYMBOLIC:
            return None
        reason = "the step fixes them, as a loop over a sequence does"
        try:
            with quiet_torch(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Raw SymInt value")
                made = SymbolicPrograms(self._compile(piece, dims), structure)
            found = None if made.fixed else made.at(shape)
        except Exception as error:  # the capture with numbers raises the user's
            found, reason = None, reason_of(error)
        if self._everywhere([found is not None]) == [False]:
            reasons.append(reason)
            return None
        self._symbolic.append(made)
        return found

    def _everywhere(self, here: list[bool]) -> list[bool]:
        """What holds on every rank of the replica."""
        ranks = [here] if len(self._team.local) == self._team.size else self._team.in_replica(lambda _: here)
        return [all(each) for each in zip(*ranks, strict=True)]

    def _compile(self, piece: Microbatch, dims: Dims | None = None) -> Compiled:
        started = time.perf_counter()
        operators, stages = carry_over(self._cut, operators_of(self._captured(piece, dims)))
        parts = parts_in_words(operators.step.outputs)
        self._parts = self._parts or parts
        if parts != self._parts:
            raise RequestError(
                f"the step returns {parts} for microbatches of {piece.shape} and {self._parts} for the example: "
                "return the same parts for every shape"
            )
        compiled = compile_possibly_empty(operators, stages, list(self._where), self._where, self._compiler)
        self.captures += 1
        self._capture_s += time.perf_counter() - started
        return compiled

    def _captured(self, piece: Microbatch, dims: Dims | None) -> CapturedStep:
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
        each_s = self._capture_s / self.captures
        other = None if self._example is None else self._example.other_value(shape)
        if other is not None:
            return self._remark_value(*other, each_s)
        self._reported_limit = full
        if full:
            return (
                f"batches keep changing shape: programs for {self._kept.limit} shapes of microbatches are kept, and "
                f"capturing the step for one more takes {each_s:.1f} s each time: pad batches to a few lengths, or "
                "give a larger max_shapes"
            )
        if each_s < _NOTICED_S:
            return None
        why = self._not_symbolic.get(structure_of(shape))
        again = f"; it is captured again for further sizes, because they cannot be symbols: {why[-1]}" if why else ""
        return f"microbatches of a new shape ({shape}): capturing the step for them took {each_s:.1f} s{again}"

    def _remark_value(self, name: str, value: Any, example: Any, each_s: float) -> str | None:
        """The line for a value that is no tensor and is not the example's, once for each leaf.

        Args:
            name: of the leaf.
            value, example: this batch's value, and the example's.
            each_s: seconds of a capture.
        """
        if name in self._reported:
            return None
        self._reported.add(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fix = (
            f"if it changes often, give it as a tensor, torch.tensor({value!r})"
            if number
            else "give a larger max_shapes for more"
        )
        return (
            f"{name} is {value!r}, and {example!r} in the example: the step is captured again for each new value, "
            f"which took {each_s:.1f} s, and programs for {self._kept.limit} shapes and values are kept: {fix}"
        )
