"""The stages of a plan in this process, and the values of their parameters and buffers.

no memory ──▶ values ──▶ optimizers
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ...backends.contract import Backend
from ...core.capture.export.captured_step import CapturedStep
from ...core.capture.programs.stage_programs import StagePrograms
from ...core.errors import RequestError
from ...core.plan.plan import Plan, Stage
from ...core.policies.sharding import shards, shards_gradients, shards_parameters
from ..launch.team import Team
from ..programs.compiled import Compiled
from ..update.buckets import Sharing, Slots
from ..update.replica_values import broadcast_initial_values
from ..update.shared_parameters import SharedParameters
from ..update.stage_state import StageState, make_optimizers
from ..update.training import Training
from ..weights import Weights, weights_from
from ..weights.places import allocate
from ..weights.remote_tensors import as_meta_tensors
from .agreement import InitialWeights
from .model_changes import KnownTensors, TiedCopies, follow_trained, refuse_strays
from .ownership import copy_tied_weights, held_here, install, own_tensors, release_others, update_copies


class LocalStages:
    """Parameters, buffers and optimizers of the stages in this process.

    Args:
        where: stage here → its torch device.
        training: creates optimizers and schedulers, and has the seed of values that no source has.
        unused: the stage of each parameter and buffer that the example's step does not use, see `stages_of_unused`.

    Attributes:
        model, plan, team, where: as given.
        states: stage here → its parameters, buffers and optimizer.
        tied: copies of tied weights that several stages here hold.
        initial: how the models of the ranks differ.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        team: Team,
        compiled: Compiled,
        where: Mapping[int, torch.device],
        training: Training,
        unused: Mapping[str, int] | None = None,
    ) -> None:
        self.model, self.plan, self.team, self.where = model, plan, team, where
        self._training = training
        self._unused = unused or {}
        self._own = own = own_tensors(model, compiled.programs, where, self._unused)
        self._read = frozenset(compiled.operators.graph.parameters)
        self._written = frozenset(compiled.operators.step.mutated_buffers)
        self._loaded, self._whole, self._handed_over, self.initial = False, False, False, InitialWeights()
        self._known = KnownTensors(model)
        self._slots: dict[int, Slots] = {}
        self.tied = TiedCopies({})
        self.states = {
            i: StageState(
                own.parameters[i],
                dict(own.buffers[i]),
                training.optimizer,
                team.replicas > 1,
                where[i],
                training.scheduler,
                self._sharing(i, programs),
                team.tensors.split,
                team.same_parts_of(self.plan.placement[i]),
            )
            for i, programs in compiled.programs.items()
        }

    def _sharing(self, stage: int, programs: StagePrograms) -> Sharing | None:
        """How the replicas of a stage share its optimizer; None if they do not."""
        if not shards(self.plan, stage) or self._training.optimizer is None:
            return None
        device, team = self.plan.placement[stage], self.team
        tied = frozenset(weight.name for weight in self.plan.tied)
        order: list[str] = []
        if programs.backward is not None:
            first = len(programs.inputs.boundary)
            order = [programs.inputs.parameters[place - first] for place in programs.backward.computed]
        gradients, parameters = shards_gradients(self.plan, stage), shards_parameters(self.plan, stage)
        if team.tensors.divided:
            same = partial(_opened, team.same_parts_of, device)
            return Sharing(same, team.batch, team.batches, tied, order=tuple(order), split=team.tensors.split)
        slots = self._slots.setdefault(device, Slots())
        replicas = partial(_opened, team.replicas_of, device)
        return Sharing(replicas, team.replica, team.replicas, tied, gradients, parameters, tuple(order), slots)

    def load(self, weights: Weights, initial: InitialWeights | None = None) -> None:
        """Load the values of the stages here, and free the parameters that other processes hold."""
        self.initial = initial or InitialWeights()
        with as_meta_tensors(self.model):
            self._load(weights)

    def _load(self, weights: Weights) -> None:
        for shared in self._shared.values():
            shared.own_memory()
            if shared.divided:
                shared.hold()
        allocate(self._without_memory())
        weights.fill(self._own.held, self._own.unallocated)
        install(self.model, self._own.unallocated)
        self.copy_buffers()
        copy_tied_weights(self.plan, self._own.parameters, self.team)
        if not self.team.tensors.divided:  # those ranks have compared theirs
            broadcast_initial_values(self.team, {device: self._tensors_on(device) for device in self.team.local})
        self._loaded = True
        self._make_optimizers()
        if len(self.team.local) < self.team.size:
            kept = set(self._own.held)
            if 0 in self.team.local:  # of every replica
                kept |= {name for name, _ in self.model.named_parameters()} - self._read - set(self._unused)
            release_others(self.model, kept, self._written.union(self._unused) - kept, self._holders())
        whole = {i: own for i, own in self._own.parameters.items() if self.states[i].shared is None}
        self._known, self.tied = KnownTensors(self.model), TiedCopies(whole)
        for shared in self._shared.values():
            shared.keep_parts()
        self.team.tensors.release()

    @property
    def _shared(self) -> dict[int, SharedParameters]:
        """The parameters that replicas share, by stage here."""
        return {i: state.shared for i, state in self.states.items() if state.shared is not None}

    @property
    def shares_parameters(self) -> bool:
        """Whether replicas share parameters of a stage here, so that each has only a part of them between steps."""
        return any(shared.divided for shared in self._shared.values())

    def refuse_whole(self, what: str) -> None:
        """Refuse an operation while parameters that replicas share are whole.

        Raises:
            RequestError: they are.
        """
        if self._whole:
            raise RequestError(f"the parameters are whole: to {what}, end the block `with whole_parameters()` first")

    @contextmanager
    def whole_parameters(self, *, gather: bool = True) -> Iterator[None]:
        """A context in which each replica holds the parameters whole that replicas share. All replicas enter it.

        What is written to the parameters within, the same in all replicas, is kept; after an error nothing is.

        Args:
            gather: False for undefined values, where all are written within: then no replica waits for another.
        """
        divided = {i: shared for i, shared in self._shared.items() if shared.divided}
        if not divided or self._whole:
            yield
            return

        def work(device: int) -> None:
            for i, shared in divided.items():
                if self.plan.placement[i] == device:
                    shared.lend(_opened(self.team.replicas_of, device) if gather else None)

        self.team.run_local(work)
        self._whole, kept = True, False
        try:
            yield
            kept = True
        finally:
            self._whole = False
            for shared in divided.values() if not self._handed_over else ():
                shared.take_back(keep=kept)

    def hand_over(self) -> None:
        """Leave the parameters, which are whole now, to the stages of another plan; these stages are not used again."""
        self._handed_over = True

    def follow_model(self, when: str) -> bool:
        """Apply changes of the model between steps: assigned buffers, frozen and unfrozen parameters.

        Args:
            when: the time of the change for messages, such as "between steps 2 and 3".

        Returns:
            Whether instructions must be bound again, because a parameter got a gradient.

        Raises:
            RequestError: a parameter was replaced, or unfrozen where that cannot be followed.
        """
        if not self._loaded:
            return False
        self._known.refuse_replaced_parameters(self.model, when)
        if self._known.write_back_buffers(when):
            self.copy_buffers()
        refuse_strays(self.model, self.states)
        return follow_trained(self.model, self.plan, self.states, self._training.needs_all_stages)

    def ensure_values(self) -> None:
        """Load values if there are none yet: the model's, and random ones for its tensors on meta."""
        if not self._loaded:
            self.load(weights_from(None, self.model, self._training.seed))

    def ensure_equal_values(self) -> None:
        """Load values if there are none yet, to compute with them or to write them to files.

        Raises:
            RequestError: the models of the ranks differ, and no checkpoint was loaded.
        """
        self.initial.refuse_different()
        self.ensure_values()

    def clamp(self, step: CapturedStep) -> None:
        """Limit the parameters that a step limits before it reads them, and their copies; see `CapturedStep.clamps`."""
        if step.clamps:
            with self.whole_parameters(), torch.no_grad():
                for name, parameter in held_here(self.model).items():
                    for method, limits in step.clamps.get(name, ()):
                        getattr(parameter, method)(*limits)
                update_copies(self.model, self.states)

    def copy_buffers(self) -> None:
        """Copy the values of buffers to their copies on other devices."""
        self._own.copy_buffers()

    def _holders(self) -> dict[str, str]:
        """Name of each parameter → the rank that holds it, in words; for a tied weight the rank of its first stage."""
        found: dict[str, str] = {}
        for stage in self.plan.stages:
            rank = self.team.rank(self.team.replica * self.team.size + stage.device)
            for name in self.names_of(stage):
                found.setdefault(name, f"rank {rank}")
        first = self.team.rank(self.team.replica * self.team.size)  # it holds the parameters that no stage reads
        return dict.fromkeys((name for name, _ in self.model.named_parameters()), f"rank {first}") | found

    def names_of(self, stage: Stage) -> list[str]:
        """Names of the parameters that a stage holds, and of the buffers that the example's step does not use."""
        return [*stage.parameters, *(name for name, index in self._unused.items() if index == stage.index)]

    def _make_optimizers(self) -> None:
        """Create the optimizers before the first step; if one rank fails, all ranks raise its error."""
        if self._training.optimizer is not None:
            parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            trained = [{n: parameters[n] for n in self.names_of(s) if n in parameters} for s in self.plan.stages]
            make_optimizers(self.states, trained, self._training.optimizer, self.team)

    def _tensors_on(self, device: int) -> list[Tensor]:
        """Parameters and buffers of a device's stages."""
        states = [self.states[stage.index] for stage in self.plan.stages_on(device)]
        return [tensor for state in states for tensor in (*state.parameters.values(), *state.buffers.values())]

    def _without_memory(self) -> list[Tensor]:
        """The tensors that are allocated when values are loaded."""
        gradients = (buffer for state in self.states.values() for buffer in state.gradient_buffers)
        own = {id(parameter) for shared in self._shared.values() for parameter in shared.memory_of}
        return [*(tensor for tensor in self._own.without_memory if id(tensor) not in own), *gradients]


def _opened(transport_of: Callable[[int], Backend | None], device: int) -> Backend:
    """The transport of a device that has one."""
    found = transport_of(device)
    assert found is not None
    return found
