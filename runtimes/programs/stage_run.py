"""A stage's programs bound to its parameters and buffers, for one shape of microbatch.

The first F of a step also computes what all microbatches of the stage read and none changes
(``core/capture/programs/shared_program``); these tensors are freed after the stage's last action.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from ...core.actions import Kind
from ...core.capture.graph.storages import storage_sizes
from ...core.capture.programs.generated_code import no_sink
from ...core.capture.programs.shared_program import Shared
from ...core.capture.programs.stage_programs import SavedStorage
from ..update.stage_state import StageState
from .bound_backward import BoundBackward, zeros
from .compiled import Compiled, Layout


@define(eq=False)
class SharedTensors:
    """The shared tensors of one stage, for all shapes of microbatches.

    Attributes:
        bytes: the largest number of bytes held in the last step, without parameters, buffers and constants.
    """

    bytes: int = field(default=0, init=False)
    _values: dict[tuple[str, tuple[int, ...]], list[Tensor]] = field(factory=dict, init=False)
    _storages: dict[int, int] = field(factory=dict, init=False)

    def of(self, program: Shared | None, fixed: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a program, computed in the first call of a step.

        Args:
            program: of the stage, for any shape of microbatch; None for one without shared tensors.
        """
        if program is None:
            return []
        key = program.key, tuple(id(fixed[i]) for i in program.reads)
        found = self._values.get(key)
        if found is None:
            with torch.no_grad():
                found = self._values[key] = program.run(list(fixed), no_sink)
            own = storage_sizes(fixed)
            self._storages |= {key: size for key, size in storage_sizes(found).items() if key not in own}
            self.bytes = sum(self._storages.values())
        return found

    @property
    def storages(self) -> set[int]:
        """Addresses of the storages held now."""
        return set(self._storages)

    def free(self) -> None:
        """Free all tensors, after the last action of a step that reads them."""
        self._values.clear()
        self._storages.clear()


class StageRun:
    """A stage that is ready to run, with its links to the stages that it exchanges messages with.

    Between F and the backward of a microbatch it holds the saved tensors only. A stage that recomputes holds the inputs
    of the recomputation until then.

    Args:
        recompute: whether saved tensors are recomputed before the backward instead of kept.
        offloaded: the storages of the saved tensors that are offloaded.
        shared: the shared tensors of the stage's runs for all shapes; by default of this one alone.

    Attributes:
        device: the torch device of its tensors.
        runs_python: whether it runs a part of the step that stays Python.
        boundary: the tensors that F reads from earlier stages, in order.
        outputs: the tensors that F returns for later stages, in order.
        results: names of the parts of the step's result that F returns, in order.
        batch: positions of the batch's leaves that it reads.
        sources: for each tensor of the boundary its sending stage, and its position in that message.
        senders: stages that send to F.
        outgoing: reader → positions of its message's tensors among the outputs.
        tangents: position of an output → readers that send its gradient, and its position in their messages.
        receivers: stages that send to B.
        returned: stage that B sends to → positions of its message's tensors in the boundary.
    """

    def __init__(
        self,
        index: int,
        compiled: Compiled,
        state: StageState,
        recompute: bool = False,
        offloaded: Sequence[SavedStorage] = (),
        shared: SharedTensors | None = None,
    ) -> None:
        self._shared = shared or SharedTensors()
        self.offloaded, self.runs_python = offloaded, compiled.runs_python(index)
        programs, step = compiled.programs[index], compiled.operators.step
        inputs, loss = programs.inputs, step.outputs.main_result
        self.index, self.programs, self.state = index, programs, state
        self.boundary, self.outputs, self.results = inputs.boundary, programs.outputs, programs.results
        self.batch = inputs.batch
        self._link(compiled.layout)
        self.device = state.device
        self._static: list[Any] = [
            *(state.parameters[name] for name in inputs.parameters),
            *(state.buffers[name] for name in inputs.buffers),
            *(constant_on(step.constants[name], state.device) for name in inputs.constants),
        ]
        self._boundary_count = len(inputs.boundary)
        self._random = inputs.random
        self._forward = programs.forward_alone if recompute else programs.forward
        self._saves = step.gradients and not recompute
        self._recompute = programs.recompute if recompute else None
        self._inputs: dict[int, list[Tensor]] = {}
        position_of_loss = len(programs.outputs) + programs.results.index(loss) if loss in programs.results else None
        returned = list(self.returned.values())
        self._backward, self._backward_input, self._backward_weight = (
            None
            if program is None
            else BoundBackward(
                program,
                inputs,
                self._static,
                position_of_loss,
                state.sink,
                returned,
                self.device,
                program is not programs.backward_input,
            )
            for program in (programs.backward, programs.backward_input, programs.backward_weight)
        )
        weight_program = programs.backward_weight
        self._kept_for_weight = frozenset(() if weight_program is None else weight_program.saved)
        ends = (len(programs.outputs), len(programs.results), len(programs.mutated))
        self._ends = ends[0], ends[0] + ends[1], sum(ends)
        self._saved: dict[int, list[Any]] = {}
        self._created: dict[int, list[Any]] = {}

    def _link(self, layout: Layout) -> None:
        """Find which tensors of which messages F and B read and return."""
        incoming = {src: tensors for (src, dst), tensors in layout.items() if dst == self.index}
        outgoing = {dst: tensors for (src, dst), tensors in layout.items() if src == self.index}
        self.sources = [
            next(
                (src, [b.name for b in tensors].index(wanted.name))
                for src, tensors in incoming.items()
                if wanted in tensors
            )
            for wanted in self.boundary
        ]
        self.senders = tuple(dict.fromkeys(src for src, _ in self.sources))
        position = {output.name: i for i, output in enumerate(self.outputs)}
        self.outgoing = {dst: [position[b.name] for b in tensors] for dst, tensors in outgoing.items()}
        # Gradients of an output are summed from its last reader to its first, as autograd does in one process.
        self.tangents = {
            position[b.name]: [
                (dst, [g.name for g in outgoing[dst] if g.differentiable].index(b.name))
                for dst in sorted(outgoing, reverse=True)
                if b in outgoing[dst]
            ]
            for b in self.outputs
            if b.differentiable
        }
        self.receivers = tuple(dict.fromkeys(dst for sources in self.tangents.values() for dst, _ in sources))
        place = {tensor.name: i for i, tensor in enumerate(self.boundary)}
        self.returned = {
            src: [place[b.name] for b in tensors if b.differentiable]
            for src, tensors in incoming.items()
            if any(b.differentiable for b in tensors)
        }
        self._forward_messages = {src: [(b.shape, b.dtype) for b in tensors] for src, tensors in incoming.items()}
        self._backward_messages = {
            dst: [(b.shape, b.dtype) for b in tensors if b.differentiable] for dst, tensors in outgoing.items()
        }

    def message(self, forward: bool, peer: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor in the message that this stage receives from stage ``peer``.

        Args:
            forward: whether it is the message that F reads; otherwise the one that B reads.
        """
        return self._forward_messages[peer] if forward else self._backward_messages[peer]

    def forward(
        self, microbatch: int, boundary: list[Any], leaves: tuple[Any, ...], key: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """F. Returns the outputs, and the parts of the step's result computed here."""
        given = self._given(boundary, leaves, key)
        boundary.clear()
        if self._recompute is not None:
            # F overwrites buffers in place; the recomputation needs their old values.
            self._inputs[microbatch] = [
                given[i] if i < self._boundary_count else given[i].clone() for i in self._recompute.inputs
            ]
        values = self._forward(given, no_sink)
        outputs, results, mutated = self._ends
        if mutated > results:
            for place, value in zip(self.programs.mutated, values[results:mutated], strict=True):
                buffer = self._static[place - self._boundary_count]
                if buffer.shape != value.shape:  # an observer's, which takes its shape in the first forward
                    buffer.resize_(value.shape)
                buffer.copy_(value)
        if self._saves:
            self._saved[microbatch] = values[mutated:]
        return values[:outputs], values[outputs:results]

    def recompute(self, microbatch: int, leaves: tuple[Any, ...], key: Tensor) -> None:
        """RECOMPUTE. Replaces the kept inputs by the saved tensors; writes no buffer."""
        assert self._recompute is not None
        given = self._given([None] * self._boundary_count, leaves, key)
        kept = self._inputs.pop(microbatch)
        for i, place in enumerate(self._recompute.inputs):
            given[place] = kept[i]
        kept.clear()  # so that each tensor is freed after its last use
        self._saved[microbatch] = self._recompute.run(given, no_sink)

    def warm_up(self, kinds: Collection[Kind], leaves: tuple[Any, ...], key: Tensor, seed: Tensor) -> None:
        """Run the programs of these kinds of actions once on zeros: CUDA loads their kernels, and compilers tune them.

        Parameters, gradients and buffers do not change, and neither do the states of random number generators. A stage
        that runs the user's Python is left out, because it is unknown what a further run of it changes.
        """
        if self.runs_python:
            return
        split = Kind.I in kinds and self._backward_input is not None and self._backward_weight is not None
        whole = self._backward is not None and (Kind.B in kinds or (Kind.I in kinds and not split))
        recompute = Kind.RECOMPUTE in kinds
        if whole or not split:
            tangents, saved = self._run_forward_on_zeros(recompute, leaves, key)
            if whole and self._backward is not None:
                given = self._given([], leaves, key)
                self._backward.run(saved, [], tangents, seed, given, sink=self._backward.discarded())
        if split and self._backward_input is not None and self._backward_weight is not None:
            tangents, saved = self._run_forward_on_zeros(recompute, leaves, key)
            first, second, given = self._backward_input, self._backward_weight, self._given([], leaves, key)
            _, created = first.run(saved, [], tangents, seed, given, False, first.discarded())
            second.run(saved, created, {}, seed, given, sink=second.discarded())

    def _run_forward_on_zeros(
        self, recompute: bool, leaves: tuple[Any, ...], key: Tensor
    ) -> tuple[dict[int, Tensor], list[Any]]:
        """Run F, and RECOMPUTE if asked. Returns gradients of the outputs, and the saved tensors."""
        boundary = [zeros(each, self.device) for each in self.programs.inputs.boundary]
        values = self._forward(self._given(list(boundary), leaves, key), no_sink)
        saved = values[self._ends[2] :]
        if recompute and self._recompute is not None:
            saved = self._recompute.run(self._given(boundary, leaves, key), no_sink)
        return {i: torch.zeros_like(values[i]) for i in self.tangents}, saved

    def _given(self, boundary: list[Any], leaves: tuple[Any, ...], key: Tensor) -> list[Any]:
        """The inputs of F, in order."""
        given = boundary + self._static
        if self.batch:
            given += [leaves[i] for i in self.batch]
        if self._random:
            given.append(key)
        given += self._shared.of(self.programs.shared, self._static)
        return given

    def free_shared(self) -> None:
        """Free the shared tensors, after the last action of a step."""
        self._shared.free()

    @property
    def shared_bytes(self) -> int:
        return self._shared.bytes

    def saved(self, microbatch: int) -> list[Any]:
        return self._saved[microbatch]

    def held(self, microbatch: int) -> list[Any]:
        """The saved tensors of a microbatch, or the inputs kept to recompute them."""
        return self._inputs.get(microbatch, []) + self._saved.get(microbatch, []) + self._created.get(microbatch, [])

    @property
    def persistent(self) -> set[int]:
        """Addresses of the storages of parameters, buffers, constants and shared tensors."""
        return {t.untyped_storage()._cdata for t in self._static} | self._shared.storages

    def backward(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        """B. Returns the messages of gradients, one for each stage in ``returned``."""
        return self._run_backward(microbatch, tangents, seed, leaves, key)

    def _run_backward(
        self,
        microbatch: int,
        tangents: dict[int, Tensor],
        seed: Tensor,
        leaves: tuple[Any, ...],
        key: Tensor,
        scattered: bool = True,
    ) -> list[list[Tensor]]:
        """The whole backward; ``scattered`` is whether SCATTER_GRAD directly follows, if replicas share gradients."""
        saved, program = self._saved.pop(microbatch), self._backward
        if program is None:
            boundary, device = self.programs.inputs.boundary, self.device
            return [[zeros(boundary[place], device) for place in places] for places in self.returned.values()]
        given, sink = self._given([], leaves, key), None if scattered else program.sink_apart
        return program.run(saved, [], tangents, seed, given, sink=sink)[0]

    def backward_input(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        """I. Returns the messages of gradients, one for each stage in ``returned``.

        A stage without a separate I runs its whole backward here if it returns gradients, and in W otherwise.
        """
        program = self._backward_input
        if program is None:
            if self.returned:
                return self._run_backward(microbatch, tangents, seed, leaves, key, scattered=False)
            self._created[microbatch] = [tangents]
            return []
        saved = self._saved[microbatch]
        given = self._given([], leaves, key)
        messages, created = program.run(saved, [], tangents, seed, given, release=False)
        self._created[microbatch] = created
        keep = self._kept_for_weight
        self._saved[microbatch] = [value if i in keep else None for i, value in enumerate(saved)]
        return messages

    def backward_weight(self, microbatch: int, seed: Tensor, leaves: tuple[Any, ...], key: Tensor) -> None:
        """W. Adds the gradients of the parameters."""
        created, program = self._created.pop(microbatch, []), self._backward_weight
        if program is not None:
            program.run(self._saved.pop(microbatch), created, {}, seed, self._given([], leaves, key))
        elif microbatch in self._saved:
            self._run_backward(microbatch, created[0] if created else {}, seed, leaves, key)

    @property
    def has_graphs(self) -> bool:
        """Whether its programs can be captured as graphs: all of them are operators on its device."""
        return not self.runs_python and self.programs.host_read is None

    @property
    def reads_seed(self) -> bool:
        """Whether a backward of it reads the gradient of the loss."""
        return any(program.reads_seed for program in self._backwards)

    @property
    def fixed(self) -> list[Tensor]:
        """Its parameters, buffers, constants, and the memory of its gradients: the same tensors in every step."""
        return [*(value for value in self._static if isinstance(value, Tensor)), *self.gradient_memory.values()]

    @property
    def gradient_memory(self) -> dict[nn.Parameter, Tensor]:
        """The memory of each gradient that its backwards add to ``grad``."""
        if self.state.scatter is not None:
            return {}
        return {p: self.state.gradient_buffer(p) for program in self._backwards for p in program.parameters}

    @property
    def _backwards(self) -> list[BoundBackward]:
        programs = self._backward, self._backward_input, self._backward_weight
        return [program for program in programs if program is not None]

    def draws(self, kind: Kind) -> tuple[int, ...]:
        """The ordinals of the random draws of its actions of a kind."""
        if kind in (Kind.F, Kind.RECOMPUTE):
            return self.programs.draws
        parts = self.programs.backward, self.programs.backward_input, self.programs.backward_weight
        return tuple(dict.fromkeys(ordinal for part in parts if part is not None for ordinal in part.draws))

    def forget(self) -> None:
        """Free what it holds of all microbatches."""
        for held in (self._saved, self._inputs, self._created):
            held.clear()
        self.free_shared()


Stages = Sequence[Mapping[int, StageRun]]
"""For each microbatch a device's stages by index."""


def constant_on(value: Any, device: torch.device) -> Any:
    """A captured constant on the stage's device; a constant on the host stays there, as in the captured graph."""
    moves = isinstance(value, Tensor) and value.device.type == device.type
    return value.to(device) if moves else value
