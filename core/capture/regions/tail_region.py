"""The tail region of a step: everything from the first line outside of all modules that needs a tensor's value."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from ...errors import RequestError
from ..values.nesting import Nesting, extract_tensors, numbers_as_tensors, tensors_of
from .calls import Place, numbered
from .late_writes import Version, may_be_written, refuse_late_writes
from .observer import Observer, Tail
from .regions import Region, TensorSpec, call_region, trained
from .replay import Copies, Locator, Replay, copy_on_meta


@frozen(eq=False)
class TailRegion:
    """The tail of a step.

    Args:
        line: its first line.
        tail: its observation.
        places: tensors that it reads: place in the observed run, and place in the capture.
        state: names of the parameters and buffers that it reads or may read.
        written: names of the buffers that it writes.
        result: the nesting of the step's result.
        made: the result's tensors and numbers, the loss first, and then the buffers that it wrote.
        draws: number of random draws.
        copied: places in the observed run of the tensors with a gradient that it writes in place.
    """

    line: str
    tail: Tail
    places: tuple[tuple[Place, Place], ...]
    state: tuple[str, ...]
    written: tuple[str, ...]
    result: Nesting
    made: tuple[TensorSpec, ...]
    draws: int
    copied: frozenset[Place] = frozenset()

    @classmethod
    def observed(
        cls,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        observer: Observer,
        names: Sequence[str],
        result: Any,
        drawn: int,
        line: str,
    ) -> "TailRegion":
        """The tail of a step, from a run with real tensors.

        Args:
            parameters, buffers: of the model at the end of the run.
            observer: of the run.
            names: of the calls up to the tail during capture.
            result: of the step.
            drawn: number of random draws of the whole step.
            line: the user's first line of the tail.

        Raises:
            RequestError: the start of the tail, or a tensor that it reads, is not found in the run.
        """
        tail, number = observer.tail(names, result)
        places = tuple((here, (number.get(here[0], -1), here[1])) for here in tail.needed)
        if any(there < 0 for _, (there, _) in places):
            raise RequestError(
                f"{line}: this line needs a value, and the step calls other operators when it is captured than when "
                "it runs; move the line and what depends on it into a module"
            )
        # Another run of the tail may read what this run did not, such as a layer that is skipped at random. A buffer
        # that was assigned before the tail is a result of a call.
        state = tuple(
            n for n, t in (*parameters.items(), *buffers.items())
            if id(t) in tail.touched or (id(t) not in tail.before and id(t) not in tail.made)
        )  # fmt: skip
        written = tuple(
            n for n in state if n in buffers and (may_be_written(buffers[n]) or id(buffers[n]) in tail.written)
        )
        tensors, nesting = extract_tensors(numbers_as_tensors(result))
        made = tuple(map(TensorSpec.like, (*tensors, *(buffers[n] for n in written))))
        copied = frozenset(place for place, t in tail.needed.items() if t.requires_grad and id(t) in tail.written)
        return cls(line, tail, places, state, written, nesting, made, drawn - tail.draws, copied)

    def call(
        self,
        model: nn.Module,
        step: Callable[..., Any],
        regions: Sequence[str],
        captured: nn.Module,
        batch: Any,
        locator: Locator,
    ) -> Any:
        """Call the tail as a region during capture; return the step's result.

        Args:
            model: the user's.
            step: the user's.
            regions: names of the modules that are regions themselves.
            captured: the model, with captured tensors.
            batch: likewise.
            locator: found the tensors that the tail reads.

        Raises:
            RequestError: the locator did not find all of them.
        """
        if any(there not in locator.found for _, there in self.places):
            raise RequestError(
                f"{self.line}: this line needs a value, and what it reads cannot be found again while the step is "
                "captured; move the line and what depends on it into a module"
            )
        copies, count = Copies(copy_on_meta(model, {})), len(self.places)
        leaves, given = extract_tensors(batch)

        def run(values: list[Tensor]) -> list[Tensor]:
            received = {
                here: tensor.clone() if here in self.copied else tensor
                for (here, _), tensor in zip(self.places, values, strict=False)
            }
            state = dict(zip(self.state, values[count + len(leaves) :], strict=True))
            state.update({key: state[key].clone() for key in self.written})
            replay = Replay(self.tail.record, received, self.line)
            buffers = {name for name, _ in copies.template.named_buffers()}
            others = {n: Version(state[n]) for n in self.state if n in buffers and n not in self.written}
            with (
                copies.lent() as bare,
                _reparametrize_module(bare, state, tie_weights=True),
                numbered(bare, regions, replay),
            ):
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
