"""The state of training, by the model's own names: weights, optimizers, schedulers, counters.

    model.NAME                       parameters and persistent buffers
    optimizer.state.NAME.KEY         the optimizer's state of a parameter, as in `optimizer_state`
    optimizer.param_groups.NAME.KEY  an option of the parameter's group
    stepped.NAME                     whether the optimizer has stepped the parameter yet
    scheduler, scaler                its class and its state
    ema.NUMBER.tensors.NAME          an average of the weights; ema.NUMBER.updates: the number of its updates
    progress.KEY                     counters, the seed, the optimizer's class

Each process has the state of its own stages; for a tied weight, that of its first stage. State that several processes
hold is equal on all of them. No name depends on the plan, so training can resume under another plan, on another number
of processes, with threads or ranks.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from ...core.errors import RequestError
from ...core.wording import first_of
from ..optimizer.stage_state import StageState
from ..training.averages import WeightAverage
from ..weights import places
from ..weights.checkpoint import without_wrappers
from ..weights.saving import savable

Listing = Mapping[str, tuple[int, ...] | None]
"""The entries of a checkpoint: flattened name → shape, or None if it is no tensor."""

_OTHER_MODEL = "it is a checkpoint of another model"
_OTHER_OPTIMIZER = "train with the one that it was written with, or load only its weights, by Run(weights=)"


@define(eq=False)
class TrainingState:
    """The training state of this process's stages.

    Args:
        model: the user's module; tensors of other processes are on meta.
        states: of this process's stages, by index.
        copy_buffers: copies the values of buffers to their replicas in other stages.
        scaler: of the loss; None without loss scaling.
        averages: of the weights, in the order of their creation.
    """

    model: nn.Module
    states: Mapping[int, StageState]
    copy_buffers: Callable[[], None]
    scaler: GradScaler | None = None
    averages: Sequence[WeightAverage] = ()

    def read(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        """The state as a nested dict; tensors are not copied.

        Args:
            counts: the pipeline's counters.
        """
        optimizer: dict[str, Any] = {}
        stepped: dict[str, bool] = {}
        for state in self.states.values():
            if state.named_state is not None:
                optimizer = state.named_state.read() | optimizer  # of a tied weight the first stage's
                stepped = state.named_state.stepped | stepped
        found: dict[str, Any] = {"model": self._tensors(), "optimizer": optimizer, "stepped": stepped}
        if self._scheduler is not None:
            # In a tuple, which DCP does not flatten: it would convert a scheduler's integer keys to strings.
            found["scheduler"] = (type(self._scheduler).__name__, self._scheduler.state_dict())
        if self.scaler is not None:
            found["scaler"] = (type(self.scaler).__name__, self.scaler.state_dict())
        for number, average in enumerate(self.averages):
            found.setdefault("ema", {})[str(number)] = {"updates": average.updates, "tensors": dict(average.tensors)}
        made = self._optimizer_name
        return {**found, "progress": {**counts, **({} if made is None else {"optimizer": made})}}

    def write(self, found: Mapping[str, Any]) -> None:
        """Restore a state from `read`; it may have more than this process needs. Gradients are cleared.

        Raises:
            RequestError: it does not fit; nothing is changed then.
        """
        if not {"model", "progress"} <= set(found):
            raise RequestError(
                "this is no state of a pipeline, as pipe.state_dict() returns it: for the weights of a model call "
                "model.load_state_dict(...) before panpipe.pipeline(...), or give Run(weights=) a safetensors file"
            )
        self.check_classes(found)
        self.check(_listing(found))
        packed = self.packed(found)
        tensors = found["model"]
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                _put(tensors[name], tensor)
            for state in self.states.values():
                for name, parameter in state.parameters.items():
                    _put(tensors[name], parameter)
            for number, average in enumerate(self.averages):
                kept = found["ema"][str(number)]
                average.updates = kept["updates"]
                for name, tensor in average.tensors.items():
                    _put(kept["tensors"][name], tensor)
        self.copy_buffers()
        for index, state in self.states.items():
            if state.optimizer is not None:
                state.optimizer.load_state_dict(packed[index])
            _resume_scheduler(state, found)
            state.clear_gradients()
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(found["scaler"][1]))

    def packed(self, found: Mapping[str, Any]) -> dict[int, Any]:
        """The states for the optimizers of the stages.

        Raises:
            RequestError: parameters of one group had different options.
        """
        return {
            index: state.named_state.packed(found["optimizer"], found["stepped"])
            for index, state in self.states.items()
            if state.named_state is not None
        }

    def check(self, listing: Listing) -> None:
        """Refuse a state of another model or optimizer, or an incomplete one.

        Args:
            listing: the entries of all processes or of this one.

        Raises:
            RequestError: the state does not fit.
        """
        tensors = self._tensors()
        lacking = [f"'{name}'" for name in tensors if f"model.{name}" not in listing]
        if lacking:
            bare = {without_wrappers(key.removeprefix("model.")) for key in listing if key.startswith("model.")}
            wrapped = bare >= {without_wrappers(name) for name in tensors}
            reason = "its names differ by '_orig_mod.' or 'module.': rename them" if wrapped else _OTHER_MODEL
            raise RequestError(f"the checkpoint has no {first_of(lacking)}, which the model has: {reason}")
        known = {place.name for held in places(self.model).values() for place in held if place.persistent}
        strange = [key.removeprefix("model.") for key in listing if key.startswith("model.")]
        strange = [f"'{name}'" for name in strange if name not in known]
        if strange:
            raise RequestError(f"the checkpoint has {first_of(strange)}, which the model does not have: {_OTHER_MODEL}")
        for name, tensor in tensors.items():
            there = listing[f"model.{name}"]
            if there != tuple(tensor.shape):
                raise RequestError(
                    f"'{name}' has the shape {there} in the checkpoint and {tuple(tensor.shape)} in the model: "
                    f"{_OTHER_MODEL}"
                )
        for number, average in enumerate(self.averages):
            for name, tensor in average.tensors.items():
                if listing.get(f"ema.{number}.tensors.{name}") != tuple(tensor.shape):
                    raise RequestError(
                        f"the checkpoint has no average of '{name}' for average {number} of the pipeline: it was "
                        "written without; call panpipe.weights.ema(pipe) after pipe.resume(), or resume from one "
                        "written with it"
                    )
        if self.scaler is not None:
            _check_there(listing, "scaler")
        if self._optimizer_name is not None:
            self._check_optimizer(listing)

    def _check_optimizer(self, listing: Listing) -> None:
        named = [state.named_state for state in self.states.values() if state.named_state is not None]
        stepped = {name for each in named for name in each.names}  # some may be frozen since
        there = _by_parameter(listing, stepped.union(*(state.trained for state in self.states.values())))
        if not there:
            raise RequestError(
                "the checkpoint has no state of an optimizer, and the pipeline has an optimizer: resume from one that "
                "was written with it, or load only its weights, by Run(weights=)"
            )
        for state in self.states.values():
            for name, kept in ({} if state.named_state is None else state.named_state.kept).items():
                found = there.get(name)
                if found is None:
                    raise RequestError(
                        f"the checkpoint's optimizer does not step '{name}' and the pipeline's does: freeze it, or "
                        "load only the checkpoint's weights, by Run(weights=)"
                    )
                if found != kept:
                    raise RequestError(
                        f"the checkpoint has {_listed(found)} of '{name}' and the pipeline's optimizer keeps "
                        f"{_listed(kept)}: it is of another optimizer; {_OTHER_OPTIMIZER}"
                    )
        if self._scheduler is not None:
            _check_there(listing, "scheduler")

    def check_classes(self, found: Mapping[str, Any]) -> None:
        """Refuse the state of another optimizer or scheduler class: different classes may have equal keys.

        Args:
            found: ``progress`` and ``scheduler``, if there are any.

        Raises:
            RequestError: the classes differ.
        """
        mine, there = self._optimizer_name, found.get("progress", {}).get("optimizer")
        if mine is not None and there is not None and mine != there:
            raise RequestError(
                f"the checkpoint is of the optimizer {there} and the pipeline has {mine}: {_OTHER_OPTIMIZER}"
            )
        own = type(self._scheduler).__name__
        wrote = found.get("scheduler", (own,))[0]
        if self._scheduler is not None and wrote != own:
            raise RequestError(
                f"the checkpoint is of the scheduler {wrote} and the pipeline has {own}: train with the one that it "
                "was written with"
            )

    @property
    def _scheduler(self) -> LRScheduler | None:
        """The scheduler of the first stage that has one: those of all stages have the same state."""
        return next((state.scheduler for state in self.states.values() if state.scheduler is not None), None)

    @property
    def _optimizer_name(self) -> str | None:
        made = (type(state.optimizer).__name__ for state in self.states.values() if state.optimizer is not None)
        return next(made, None)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in savable(self.model).items()}


def _check_there(listing: Listing, kind: str) -> None:
    """Refuse a checkpoint without the state of the pipeline's scaler or scheduler."""
    if kind not in listing:
        raise RequestError(
            f"the checkpoint has no state of a {kind}, and the pipeline has one: leave {kind}= out, or resume from a "
            "checkpoint that was written with it"
        )


def _resume_scheduler(state: StageState, found: Mapping[str, Any]) -> None:
    if state.scheduler is None:
        return
    state.scheduler.load_state_dict(copy.deepcopy(found["scheduler"][1]))
    # The checkpoint has options by parameter, so an empty group finds none.
    for group, rate in zip(state.scheduler.optimizer.param_groups, state.scheduler.get_last_lr(), strict=True):
        if not group["params"]:
            group["lr"] = rate


def _put(value: Tensor, tensor: Tensor) -> None:
    if value.data_ptr() != tensor.data_ptr():
        tensor.copy_(value)


def _listing(found: Mapping[str, Any]) -> Listing:
    listing: dict[str, tuple[int, ...] | None] = {
        f"model.{n}": tuple(t.shape) for n, t in found.get("model", {}).items()
    }
    for number, kept in found.get("ema", {}).items():
        listing |= {f"ema.{number}.tensors.{n}": tuple(t.shape) for n, t in kept["tensors"].items()}
    listing |= dict.fromkeys(f"optimizer.{name}" for name in found.get("optimizer", {}))
    return listing | dict.fromkeys(name for name in ("scheduler", "scaler") if name in found)


def _by_parameter(listing: Listing, names: set[str]) -> dict[str, set[str]]:
    """Parameter → the keys of its optimizer state in the checkpoint; empty for one that has only options."""
    found: dict[str, set[str]] = {}
    for key in listing:
        section, _, rest = key.removeprefix("optimizer.").partition(".")
        if not key.startswith("optimizer.") or section not in ("state", "param_groups"):
            continue
        parts = rest.split(".")
        end = next((i for i in range(len(parts) - 1, 0, -1) if ".".join(parts[:i]) in names), None)
        if end is not None:
            kept = found.setdefault(".".join(parts[:end]), set())
            if section == "state":
                kept.add(".".join(parts[end:]))
    return found


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"
