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

Whether a checkpoint fits a pipeline is checked before anything of the pipeline changes.
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
from ...core.files.limits import short
from ...core.wording import first_of
from ..training.averages import WeightAverage
from ..update.stage_state import StageState
from ..weights import places
from ..weights.checkpoint import without_wrappers
from ..weights.saving import savable
from .reading import CheckpointReader
from .state_parts import Parts

Listing = Mapping[str, tuple[int, ...] | None]
"""The entries of a checkpoint: name → shape, or None if it is no tensor."""

_OTHER_MODEL = "it is a checkpoint of another model"
_OTHER_OPTIMIZER = "train with the one that it was written with, or load only its weights, by Run(weights=)"


@define(eq=False)
class TrainingState:
    """The training state of this process's stages.

    Args:
        model: the user's module; tensors of other processes are on meta.
        copy_buffers: copies the values of buffers to their replicas in other stages.
        scaler: of the loss; None without loss scaling.
        averages: of the weights, in the order of their creation.
    """

    model: nn.Module
    states: Mapping[int, StageState]
    copy_buffers: Callable[[], None]
    scaler: GradScaler | None = None
    averages: Sequence[WeightAverage] = ()

    def read(self, counts: Mapping[str, Any]) -> Parts:
        """The state by name; tensors are not copied.

        Args:
            counts: the pipeline's counters.
        """
        found = Parts()
        found.add("model", self._tensors())
        for state in reversed([*self.states.values()]):  # of a tied weight the first stage's
            if state.named_state is not None:
                found.add("optimizer", state.named_state.read())
                found.add("stepped", state.named_state.stepped)
        if self._scheduler is not None:
            # In a tuple, which DCP does not flatten: it would convert a scheduler's integer keys to strings.
            found.items["scheduler"] = (type(self._scheduler).__name__, self._scheduler.state_dict())
        if self.scaler is not None:
            found.items["scaler"] = (type(self.scaler).__name__, self.scaler.state_dict())
        for number, average in enumerate(self.averages):
            found.add(f"ema.{number}", {"updates": average.updates})
            found.add(f"ema.{number}.tensors", average.tensors)
        made = self._optimizer_name
        found.add("progress", {**counts, **({} if made is None else {"optimizer": made})})
        return found

    def write(self, found: Parts) -> None:
        """Restore a state from `read`; it may have more than this process needs. Gradients are cleared.

        Raises:
            RequestError: it does not fit; nothing is changed then.
        """
        self.check({name: tuple(tensor.shape) for name, tensor in found.tensors.items()}, found.items)
        packed, tensors = self.packed(found), found.tensors
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                _put(tensors[f"model.{name}"], tensor)
            for state in self.states.values():
                for name, parameter in state.parameters.items():
                    _put(tensors[f"model.{name}"], parameter)
            for number, average in enumerate(self.averages):
                average.updates = found.items[f"ema.{number}.updates"]
                for name, tensor in average.tensors.items():
                    _put(tensors[f"ema.{number}.tensors.{name}"], tensor)
        self.copy_buffers()
        for index, state in self.states.items():
            if state.optimizer is not None:
                state.optimizer.load_state_dict(packed[index])
            _resume_scheduler(state, found.items)
            state.clear_gradients()
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(found.items["scaler"][1]))

    def packed(self, found: Parts) -> dict[int, Any]:
        """The states for the optimizers of the stages.

        Raises:
            RequestError: parameters of one group had different options.
        """
        optimizer, stepped = found.section("optimizer"), found.section("stepped")
        named = {index: state.named_state for index, state in self.states.items()}
        return {index: each.packed(optimizer, stepped) for index, each in named.items() if each is not None}

    def check(self, shapes: Mapping[str, tuple[int, ...]], items: Mapping[str, Any]) -> None:
        """Refuse a state of another model, optimizer or scheduler, or an incomplete one.

        Args:
            shapes: of the tensors of all processes or of this one.
            items: the other entries.

        Raises:
            RequestError: the state does not fit.
        """
        self._check_classes(items)
        tensors, listing = self._tensors(), {**shapes, **dict.fromkeys(items)}
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

    def _check_classes(self, items: Mapping[str, Any]) -> None:
        """Refuse the state of another optimizer or scheduler class: different classes may have equal keys."""
        mine, there = self._optimizer_name, items.get("progress.optimizer")
        if mine is not None and there is not None and mine != there:
            raise RequestError(
                f"the checkpoint is of the optimizer {there} and the pipeline has {mine}: {_OTHER_OPTIMIZER}"
            )
        own = type(self._scheduler).__name__
        wrote = items.get("scheduler", (own,))[0]
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


def _resume_scheduler(state: StageState, items: Mapping[str, Any]) -> None:
    if state.scheduler is None:
        return
    state.scheduler.load_state_dict(copy.deepcopy(items["scheduler"][1]))
    # The checkpoint has options by parameter, so an empty group finds none.
    for group, rate in zip(state.scheduler.optimizer.param_groups, state.scheduler.get_last_lr(), strict=True):
        if not group["params"]:
            group["lr"] = rate


def _put(value: Tensor, tensor: Tensor) -> None:
    if value.data_ptr() != tensor.data_ptr():
        tensor.copy_(value)


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


def fitted(own: Parts, reader: CheckpointReader, training: TrainingState) -> Parts:
    """The parts that a pipeline loads: its own tensors, which are to be overwritten, and the checkpoint's items.

    Args:
        training: the pipeline's state.

    Raises:
        RequestError: the checkpoint is of another model, optimizer or scheduler, or was not written by panpipe.
    """
    for name in ("scheduler", "scaler"):
        if name in reader.items:
            _check_class_and_state(name, reader.items[name])
    training.check({name: kept.shape for name, kept in reader.tensors.items()}, reader.items)
    for name, tensor in own.tensors.items():
        kept = reader.tensors.get(name)
        if kept is None:
            raise RequestError(f"the checkpoint has no tensor '{name}', which the pipeline has: {_OTHER}")
        if (kept.shape, kept.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise RequestError(
                f"'{name}' is {_text(kept.shape, kept.dtype)} in the checkpoint and "
                f"{_text(tensor.shape, tensor.dtype)} in the pipeline: {_OTHER}"
            )
    items = {}
    for name, item in own.items.items():
        if name not in reader.items:
            raise RequestError(f"the checkpoint has no '{name}', which the pipeline has: {_OTHER}")
        found = items[name] = reader.items[name]
        check_item(name, item, found)
        if isinstance(item, Tensor):
            items[name] = found.to(item.device)
    parts = Parts(own.tensors, items)
    training.packed(parts)
    return parts


_OTHER = "resume with the model and arguments that it was written with"


def _text(shape: object, dtype: object) -> str:
    return f"{dtype} of shape {tuple(shape)}"  # type: ignore[arg-type]


_COUNTS = ("progress.steps", "progress.updates", "progress.evaluations")


def check_item(name: str, own: Any, found: Any) -> None:
    """Refuse an item of another kind than the pipeline's own, so that nothing fails once it is loaded.

    Raises:
        RequestError: it is of another kind, or a number is out of range.
    """
    counted = name in _COUNTS or (name.startswith("ema.") and name.endswith(".updates"))
    if counted and (type(found) is not int or not 0 <= found < 1 << 63):
        raise _refusal(name, "a number of steps from 0 to 2⁶³", found)
    if name == "progress.seed" and (type(found) is not int or not -(1 << 64) < found < 1 << 64):
        raise _refusal(name, "a seed of 64 bits", found)
    if name in ("scheduler", "scaler"):
        _check_class_and_state(name, found)
    _check(name, own, found)


def _check_class_and_state(name: str, found: Any) -> None:
    """Refuse what is not a class name with a state: the items of schedulers and scalers."""
    if not (isinstance(found, tuple) and [type(each) for each in found] == [str, dict]):
        raise _refusal(name, "a class name and a state", found)


def _check(name: str, own: Any, found: Any) -> None:
    by_name = isinstance(own, Mapping) and all(isinstance(key, str) for key in own)
    if _is_number(own):
        wanted, right = "a number of 64 bits", _is_number(found)
    elif own is None:
        wanted, right = "a plain value", found is None or _is_number(found) or isinstance(found, bool | str)
    elif isinstance(own, bool):
        wanted, right = "true or false", found is None or isinstance(found, bool)
    elif isinstance(own, Tensor):
        wanted = f"a tensor, {_text(own.shape, own.dtype)}"
        right = isinstance(found, Tensor) and (own.shape, own.dtype) == (found.shape, found.dtype)
    elif isinstance(own, list | tuple):
        wanted, right = f"a list of {len(own)}", isinstance(found, list | tuple) and len(found) == len(own)
    elif by_name:
        wanted, right = "a dict", isinstance(found, Mapping)
    elif isinstance(own, Mapping):  # such as the milestones of MultiStepLR
        wanted = "a dict of numbers"
        right = isinstance(found, Mapping) and all(map(_is_number, (*found.keys(), *found.values())))
    else:
        wanted, right = f"a {type(own).__name__}", type(found) is type(own)
    if not right:
        raise _refusal(name, wanted, found)
    if by_name:
        _check_keys(name, own, found)
    elif isinstance(own, list | tuple):
        for place, (mine, there) in enumerate(zip(own, found, strict=True)):
            _check(f"{name}[{place}]", mine, there)


def _check_keys(name: str, own: Mapping[str, Any], found: Mapping[Any, Any]) -> None:
    other = next((key for key in (*own, *found) if (key in own) != (key in found)), None)
    if other is not None:
        side = "the checkpoint lacks" if other in own else "the pipeline lacks"
        raise RequestError(
            f"'{name}' of the checkpoint is of another version or kind: {side} {str(other)[:100]!r}; resume with the "
            "versions and arguments that it was written with"
        )
    for key, mine in own.items():
        _check(f"{name}.{key}", mine, found[key])


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 64)


def _refusal(name: str, wanted: str, found: Any) -> RequestError:
    there = _text(found.shape, found.dtype) if isinstance(found, Tensor) else short(found)
    return RequestError(
        f"'{name[:200]}' is {there} in the checkpoint and must be {wanted}: it was written by another pipeline; "
        "resume with the arguments that it was written with"
    )
