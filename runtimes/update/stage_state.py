"""The state of a stage between steps: parameters, buffers, gradients and the optimizer."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ...backends.contract import Backend
from ..devices.compute import compute_device
from ..launch.team import Team
from .buckets import Bucket, GradientSink, Sharing, Transfers, divided
from .optimizer_state import NamedState
from .optimizers import (
    OptimizerFactory,
    SchedulerFactory,
    check_groups,
    join_optimizer,
    options_of,
    stage_optimizer,
    stage_scheduler,
)
from .shards import Shards
from .shared_parameters import SharedParameters
from .trials import check_elementwise, check_separable


class StageState:
    """Parameters, buffers, gradients and optimizer of one stage.

    Args:
        parameters: by qualified name; the user's own tensors, or a copy of a tied weight.
        replicated: whether its gradients are summed over replicas of the pipeline.
        split: names of parameters of which replicas hold different parts: their gradients are summed only over the
            replicas with the same part.
        same_parts: this device's transport to them; None if there are no others.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        buffers: dict[str, Tensor],
        optimizer: OptimizerFactory | None,
        replicated: bool = False,
        device: torch.device | None = None,
        scheduler: SchedulerFactory | None = None,
        sharing: Sharing | None = None,
        split: frozenset[str] = frozenset(),
        same_parts: Backend | None = None,
    ) -> None:
        self.split, self._same_parts = split, same_parts
        self.parameters = parameters
        self.device = device or compute_device([*parameters.values(), *buffers.values()])
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._replicated, self.sharing = replicated, sharing
        self.buffers = buffers
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        self._trained = {name for name, p in parameters.items() if p.requires_grad}
        self._checked = 0
        self.shared: SharedParameters | None = None
        if sharing is not None and sharing.parameters:
            self.shared = self.shards.shared

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, or None; created on first use."""
        trained = list(self.trained.items())
        if self._make_optimizer is None or not trained:
            return None
        with self._plain():
            made = stage_optimizer(self._make_optimizer, trained)
        if made is not None and self.sharing is not None:
            self.shards.narrow_optimizer(made)
        return made

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Its parameters that are not frozen."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @cached_property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler of the optimizer, or None."""
        if self._make_scheduler is None or self.optimizer is None:
            return None
        return stage_scheduler(self._make_scheduler, self.optimizer)

    @cached_property
    def named_state(self) -> NamedState | None:
        """The optimizer's state by the names of parameters; None without an optimizer."""
        if self._make_optimizer is None or self.optimizer is None:
            return None
        shards = None if self.sharing is None else self.shards
        return NamedState(self.optimizer, self._make_optimizer, self.parameters, shards)

    def stray(self) -> Tensor | None:
        """A tensor that the user added to the optimizer and that is no parameter of this stage, or None."""
        optimizer = vars(self).get("optimizer")
        groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
        count = sum(map(len, groups))
        if count == self._checked:
            return None
        own = {id(parameter) for parameter in self.updated.values()}
        stray = next((p for group in groups for p in group if id(p) not in own), None)
        if stray is None:
            self._checked = count
        return stray

    @property
    def updated(self) -> dict[str, nn.Parameter]:
        """By name what the optimizer steps, with the reduced gradients: the parameters, or this replica's slices."""
        return self.parameters if self.sharing is None else self.shards.values

    def trains(self, name: str) -> bool:
        """Whether a parameter was trained when the optimizer was created, or has joined since."""
        return name in self._trained

    def join(self, name: str) -> None:
        """Train a parameter that was frozen, from now on.

        It joins the group of the optimizer that the user's function would put it into.

        Raises:
            RequestError: the optimizer's groups or its scheduler cannot take it.
        """
        self._trained.add(name)
        self._gradients.clear()
        if "shards" in vars(self):
            self.shards.add(name, self.parameters[name])
        for cached in ("_buckets", "named_state"):
            vars(self).pop(cached, None)
        if self._make_optimizer is None or "optimizer" not in vars(self):
            return
        if self.optimizer is None and self._make_scheduler is None:
            del self.optimizer  # created on next use
            return
        with self._plain():
            join_optimizer(self.optimizer, self._make_optimizer, list(self.trained.items()), name)
        if self.sharing is not None and self.optimizer is not None:
            self.shards.narrow_optimizer(self.optimizer)

    def _plain(self) -> AbstractContextManager[None]:
        """A context in which the whole parameters are plain tensors, perhaps of zeros, to create an optimizer."""
        shared = self.shared
        return shared.stand_ins() if shared is not None and shared.without_memory else nullcontext()

    @property
    def gradient_buffers(self) -> list[Tensor]:
        """The memory of all gradients allocated so far."""
        if "shards" in vars(self):
            known, memory = self.shards.buckets, self.shards.buffers
        else:
            known = [bucket for bucket, _ in vars(self).get("_buckets", ())]
            memory = [bucket.memory for bucket in known if bucket.memory is not None]
        inside = {parameter for bucket in known for parameter in bucket.gradients}
        own = [gradient for parameter, gradient in self._gradients.items() if parameter not in inside]
        return [*memory, *own]

    @cached_property
    def _buckets(self) -> list[tuple[Bucket, Backend | None]]:
        """The buckets, if replicas share nothing, each with the transport that sums it; None for that to all replicas.

        Split parameters are summed over the replicas that have the same parts, if there are any.
        """
        apart = {name: p for name, p in self.trained.items() if name in self.split}
        whole = {name: p for name, p in self.trained.items() if name not in self.split}
        found: list[tuple[Bucket, Backend | None]] = [(Bucket(held), None) for held in divided(whole)]
        if self._same_parts is not None:
            found += [(Bucket(held), self._same_parts) for held in divided(apart)]
        return found

    def copies(self, name: str, replicas: int) -> int:
        """How many of some replicas have the same part of a parameter, that of a tensor rank or of sharing."""
        if self.sharing is not None:
            split = self.sharing.split
            return 1 if split is None or name in split else replicas // self.sharing.count
        return 1 if self._same_parts is None else self._same_parts.devices

    @cached_property
    def shards(self) -> Shards:
        """This replica's parts, if replicas share the optimizer."""
        assert self.sharing is not None
        frozen = {name: p for name, p in self.parameters.items() if not p.requires_grad}
        return Shards(self.trained, self.sharing, frozen=frozen)

    @property
    def scatter(self) -> Shards | None:
        """Sums gradients microbatch by microbatch, if replicas share them; then no parameter has one."""
        return self.shards if self.sharing is not None and self.sharing.gradients else None

    def sink(self, parameters: Sequence[nn.Parameter], scattered: bool) -> GradientSink:
        """The sink of a backward program: to slots if replicas share gradients, otherwise to ``grad``.

        Args:
            scattered: whether SCATTER_GRAD directly follows the program.
        """
        if self.scatter is not None:
            return self.scatter.sink(parameters, scattered)
        for parameter in parameters:
            self.gradient_buffer(parameter)  # allocated before the first step
        return GradientSink(parameters, self._place)

    def _place(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        held = parameter.grad
        if held is not None:
            return held, True
        parameter.grad = memory = self.gradient_buffer(parameter)
        return memory, False

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        """The tensor in which a parameter's gradient is accumulated in every step.

        It is never freed: allocating and freeing gradients between saved tensors would fragment memory, by a quarter of
        the peak on one worker of the benchmark GPT.
        """
        if parameter not in self._gradients and (self._replicated or self.sharing is not None):
            known = [bucket for bucket, _ in self._buckets] if self.sharing is None else self.shards.buckets
            for bucket in known:
                self._gradients |= bucket.gradients
        if parameter not in self._gradients:
            self._gradients[parameter] = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        return self._gradients[parameter]

    @property
    def with_gradients(self) -> list[Tensor]:
        """The tensors whose ``grad`` a step sets: the parameters, and this replica's slices."""
        slices = self.shards.values.values() if "shards" in vars(self) else ()
        return [*(() if self.shared is not None else self.parameters.values()), *slices]

    def clear_gradients(self) -> None:
        """Set all gradients to None, until the next one is added."""
        for tensor in self.with_gradients:
            tensor.grad = None
        if "shards" in vars(self):
            self.shards.clear()

    def reduce_gradients(self, replicas: Backend) -> Transfers:
        """Start to sum the gradients over all replicas."""
        if self.sharing is not None:
            return self.shards.reduce(replicas)
        buckets = [bucket for bucket, _ in self._buckets]

        def end() -> None:
            for bucket in buckets:
                bucket.assign_gradients()

        sums = [partial(bucket.reduce_collected, same or replicas) for bucket, same in self._buckets]
        return Transfers(sums, sum(bucket.nbytes for bucket in buckets), end)

    def gather(self, replicas: Backend) -> Transfers:
        """Start to gather the parameters of which replicas stepped slices, over the transport to those that share."""
        return self.shards.gather()

    def unshard(self, replicas: Backend) -> Transfers:
        """Start to gather the parameters that replicas share, for a run of actions."""
        assert self.shared is not None
        return self.shared.gather(replicas)

    @property
    def gradients(self) -> list[Tensor]:
        """All reduced gradients."""
        return [p.grad for p in self.updated.values() if p.grad is not None]

    def divide_gradients(self, divisor: Tensor | float) -> None:
        """Divide all reduced gradients by a number, or by a scalar tensor on their device."""
        held, on_host = self.gradients, not isinstance(divisor, Tensor) or divisor.device.type == "cpu"
        if held and not (on_host and divisor == 1):
            torch._foreach_div_(held, float(divisor) if on_host else divisor)

    @property
    def handles_found_inf(self) -> bool:
        """Whether the optimizer skips a step by itself, from ``found_inf`` as in ``torch.amp.GradScaler.step``, and no
        scheduler depends on it. Fused optimizers do, so that the host need not know."""
        return getattr(self.optimizer, "_step_supports_amp_scaling", False) and self.scheduler is None

    def step(self, found_inf: Tensor | None = None) -> None:
        """Step the optimizer, then its scheduler; a skipped update does not change the learning rate.

        Args:
            found_inf: a scalar on the stage's device, not 0 if the optimizer shall skip its step; only if
                `handles_found_inf`.
        """
        if self.optimizer is not None:
            if self.sharing is not None:
                self.shards.follow()
            optimizer: Any = self.optimizer
            if found_inf is not None:  # the attributes that GradScaler.step sets for unscaled gradients
                optimizer.grad_scale, optimizer.found_inf = None, found_inf
            try:
                optimizer.step()
            finally:
                if found_inf is not None:
                    del optimizer.grad_scale, optimizer.found_inf
        if self.scheduler is not None:
            self.scheduler.step()


def make_optimizers(
    states: Mapping[int, StageState], trained: Sequence[Mapping[str, nn.Parameter]], make: OptimizerFactory, team: Team
) -> None:
    """Create the optimizers and schedulers of all stages; if one fails, all processes fail.

    Raises:
        RequestError: the user's functions return objects that a pipeline cannot use.
    """
    groups = dict[int, list[dict[str, str]]]()
    with team.agreeing():
        check_separable(make, trained)
        if any(state.sharing is not None or state.split for state in states.values()):
            check_elementwise(make, trained)
        for index, state in states.items():
            if state.optimizer is not None and state.scheduler is not None:
                groups[index] = options_of(state.optimizer)
    groups_of_all = team.everywhere(lambda _: groups)
    check_groups({index: options for found in groups_of_all for index, options in found.items()})
