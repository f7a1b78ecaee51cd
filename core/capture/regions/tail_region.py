"""The tail of a step that stays Python: all behind the first line, outside of every module, that needs a value."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from ...errors import RequestError
from ..python.late_writes import Version, may_be_written, refuse_late_writes
from ..values.nesting import Nesting, numbers_as_tensors, taken_apart, tensors_of
from .regions import Made, Region, call_region, trained
from .replay import Locator, Observer, Place, Replay, Tail, numbered, skeleton


@frozen(eq=False)
class TailRegion:
    """The tail of a step.

    Args:
        line: where it begins.
        tail: what was observed of it.
        places: what it reads: place in a run, and place in capture.
        state: names of the parameters and buffers that it reads or may read.
        written: names of the buffers that it writes.
        result: the nesting of the step's result.
        made: its tensors and numbers, the loss first, and then the buffers that it wrote.
        draws: random draws.
    """

    line: str
    tail: Tail
    places: tuple[tuple[Place, Place], ...]
    state: tuple[str, ...]
    written: tuple[str, ...]
    result: Nesting
    made: tuple[Made, ...]
    draws: int

    @classmethod
    def observed(
        cls,
        model: nn.Module,
        stand_ins: Mapping[str, Tensor],
        observer: Observer,
        names: Sequence[str],
        result: Any,
        drawn: int,
        line: str,
    ) -> "TailRegion":
        """The tail of a step that was run for real.

        Args:
            model: the user's.
            stand_ins: name of a parameter or buffer → what the run had in its place.
            observer: saw the run.
            names: of the calls that capture saw up to the tail.
            result: what the step returned.
            drawn: random draws of the whole step.
            line: the user's line that begins the tail.

        Raises:
            RequestError: where the tail begins, or what it reads, is not found in the run.
        """
        tail, number = observer.tail(names, result)
        places = tuple((here, (number.get(here[0], -1), here[1])) for here in tail.needed)
        if any(there < 0 for _, (there, _) in places):
            raise RequestError(
                f"{line}: this line needs a value, and the step calls other operators when it is captured than when "
                "it runs; move the line and what depends on it into a module"
            )
        buffers = {name: stand_ins.get(name, tensor) for name, tensor in model.named_buffers()}
        parameters = {name: stand_ins.get(name, tensor) for name, tensor in model.named_parameters()}
        # What nothing reads in this run, such as a layer that is skipped at random, another run of the tail may read.
        state = tuple(
            n for n, t in (*parameters.items(), *buffers.items())
            if id(t) in tail.touched or id(t) not in tail.before
        )  # fmt: skip
        written = tuple(
            n for n in state if n in buffers and (may_be_written(buffers[n]) or id(buffers[n]) in tail.written)
        )
        tensors, nesting = taken_apart(numbers_as_tensors(result))
        made = tuple(map(Made.like, (*tensors, *(buffers[n] for n in written))))
        return cls(line, tail, places, state, written, nesting, made, drawn - tail.draws)

    def call(
        self,
        model: nn.Module,
        step: Callable[..., Any],
        regions: Sequence[str],
        captured: nn.Module,
        batch: Any,
        locator: Locator,
    ) -> Any:
        """Make it a region of what is captured; returns the step's result.

        Args:
            model: the user's.
            step: the user's.
            regions: names of the modules that are regions themselves.
            captured: the model, with tensors that are captured.
            batch: likewise.
            locator: found what the tail reads.

        Raises:
            RequestError: the locator did not find all of it.
        """
        if any(there not in locator.found for _, there in self.places):
            raise RequestError(
                f"{self.line}: this line needs a value, and what it reads cannot be found again while the step is "
                "captured; move the line and what depends on it into a module"
            )
        bare, count = skeleton(model, {}), len(self.places)
        leaves, given = taken_apart(batch)

        def run(values: list[Tensor]) -> list[Tensor]:
            received = {here: tensor for (here, _), tensor in zip(self.places, values, strict=False)}
            state = dict(zip(self.state, values[count + len(leaves) :], strict=True))
            state.update({key: state[key].clone() for key in self.written})
            replay = Replay(self.tail.record, received, self.line)
            buffers = {name for name, _ in bare.named_buffers()}
            others = {n: Version(state[n]) for n in self.state if n in buffers and n not in self.written}
            with _reparametrize_module(bare, state, tie_weights=True), numbered(bare, regions, replay):
                result = step(bare, given.filled(values[count:]))
            refuse_late_writes(f"{self.line}: the step", others, state)
            return [*tensors_of(numbers_as_tensors(result)), *(state[key] for key in self.written)]

        own = {**dict(captured.named_parameters()), **dict(captured.named_buffers())}
        reads = [*(locator.found[there] for _, there in self.places), *leaves, *(own[name] for name in self.state)]
        found = call_region(Region("", self.line, run, self.made, trained(reads), self.draws), reads)
        results = len(found) - len(self.written)
        for key, value in zip(self.written, found[results:], strict=True):
            own[key].copy_(value.detach())
        return self.result.filled(found[:results])
