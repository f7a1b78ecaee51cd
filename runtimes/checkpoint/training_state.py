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
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from attrs import NOTHING, define
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from ...core.errors import RequestError
from ...core.files.limits import short
from ...core.wording import first_of
from ..training.averages import WeightAverage
from ..update.optimizer_state import leaves_of
from ..update.stage_state import StageState
from ..weights import places
from ..weights.checkpoint import savable, without_wrappers
from .reading import CheckpointReader, Parts

_OTHER_OPTIMIZER = "train with the one that it was written with, or load only its weights, by Run(weights=)"
_STATE, _OPTIONS = "optimizer.state.", "optimizer.param_groups."
_FIXES = {
    "model": "it is a checkpoint of another model",
    "optimizer": f"it is of another optimizer; {_OTHER_OPTIMIZER}",
    "ema": "it was written without; call panpipe.weights.ema(pipe) after pipe.resume()",
    "scheduler": "leave scheduler= out, or resume from a checkpoint that was written with one",
    "scaler": "leave scaler= out, or resume from a checkpoint that was written with one",
}
"""What to do about a part that a checkpoint lacks, has in addition or in another shape, by its section."""


@define(eq=False)
class TrainingState:
    """The training state of this process's stages.

    Args:
        model: the user's module; tensors of other processes are on meta.
        copy_buffers: copies the values of buffers to their replicas in other stages.
    """

    model: nn.Module
    states: Mapping[int, StageState]
    copy_buffers: Callable[[], None]
    scaler: GradScaler | None = None
    averages: Sequence[WeightAverage] = ()

    def read(self, counts: Mapping[str, Any]) -> Parts:
        """The state by name, with the pipeline's counters; tensors are not copied."""
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
            found.add(f"ema.{number}", leaves_of({"updates": average.updates, "tensors": average.tensors}))
        made = self._optimizer_name
        found.add("progress", {**counts, **({} if made is None else {"optimizer": made})})
        return found

    def write(self, found: Parts) -> None:
        """Restore a state that fits, see `check`; it may have more than this process needs. Gradients are cleared.

        Raises:
            RequestError: parameters of one group had different options; nothing is changed then.
        """
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
            state.clear_gradients()
            if state.scheduler is not None:
                state.scheduler.load_state_dict(copy.deepcopy(found.items["scheduler"][1]))
                # The checkpoint has options by parameter, so an empty group finds none.
                groups = state.scheduler.optimizer.param_groups
                for group, rate in zip(groups, state.scheduler.get_last_lr(), strict=True):
                    if not group["params"]:
                        group["lr"] = rate
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

    def check(self, own: Parts, tensors: Mapping[str, Any], items: Mapping[str, Any]) -> None:
        """Refuse a state of another model, optimizer or scheduler, or an incomplete one.

        Args:
            own: the state of this process.
            tensors: what has the shape of a tensor, by name: of all processes or of this one.

        Raises:
            RequestError: the state does not fit.
        """
        self._check_classes(items)
        stepped = _stepped(own.items)
        lacking: list[str] = [name for name in ("scheduler", "scaler") if name in own.items and name not in items]
        lacking += [name for name in own.tensors if name not in tensors]
        lacking += [name for name in own.items if name.startswith(_STATE) and name not in items]
        lacking += [f"{_OPTIONS}{name}" for name in sorted(stepped - _stepped(items))]
        if lacking:
            section = _section(lacking[0])
            bare = {without_wrappers(name.removeprefix("model.")) for name in tensors if _section(name) == "model"}
            wrapped = section == "model" and bare >= {without_wrappers(name) for name in self._tensors()}
            fix = "its names differ by '_orig_mod.' or 'module.': rename them" if wrapped else _FIXES[section]
            listed = first_of([f"'{name}'" for name in lacking if _section(name) == section])
            raise RequestError(f"the checkpoint has no {listed}, which the pipeline has: {fix}")
        known = {f"model.{place.name}" for held in places(self.model).values() for place in held if place.persistent}
        for name in sorted({*tensors, *items}.difference(known, own.names)):
            if (section := _section(name)) == "model" or _is_state_of(name, stepped):
                raise RequestError(
                    f"the checkpoint has '{name[:200]}', which the pipeline does not have: {_FIXES[section]}"
                )
        for name, tensor in own.tensors.items():
            if (there := tuple(tensors[name].shape)) != tuple(tensor.shape):
                raise RequestError(
                    f"'{name}' has the shape {there} in the checkpoint and {tuple(tensor.shape)} in the pipeline: "
                    f"{_FIXES[_section(name)]}"
                )

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


def _put(value: Tensor, tensor: Tensor) -> None:
    if value.data_ptr() != tensor.data_ptr():
        tensor.copy_(value)


def _section(name: str) -> str:
    return name.partition(".")[0]


def _stepped(names: Iterable[str]) -> set[str]:
    """The parameters of which there are options."""
    return {name.removeprefix(_OPTIONS).rpartition(".")[0] for name in names if name.startswith(_OPTIONS)}


def _is_state_of(name: str, parameters: Set[str]) -> bool:
    """Whether a name is of the optimizer's state of one of some parameters."""
    words = name.removeprefix(_STATE).split(".")
    return name.startswith(_STATE) and any(".".join(words[:end]) in parameters for end in range(1, len(words)))


def fitted(own: Parts, reader: CheckpointReader, training: TrainingState) -> Parts:
    """The parts that a pipeline loads: its own tensors, which are to be overwritten, and the checkpoint's items.

    Raises:
        RequestError: the checkpoint is of another model, optimizer or scheduler, or was not written by panpipe.
    """
    there = reader.manifest.items
    for name in ("scheduler", "scaler"):
        if name in there and not (
            isinstance(there[name], tuple) and [type(each) for each in there[name]] == [str, dict]
        ):
            raise _refusal(name, "a class name and a state", there[name])
    training.check(own, reader.tensors, there)
    for name, tensor in own.tensors.items():
        if (dtype := reader.tensors[name].dtype) != tensor.dtype:
            raise RequestError(f"'{name}' is {dtype} in the checkpoint and {tensor.dtype} in the pipeline: {_OTHER}")
    items = {}
    for name, item in own.items.items():
        check_item(name, item, there.get(name, NOTHING))
        items[name] = there[name].to(item.device) if isinstance(item, Tensor) else there[name]
    parts = Parts(own.tensors, items)
    training.packed(parts)
    return parts


_OTHER = "resume with the model, arguments and versions that it was written with"


def _text(shape: object, dtype: object) -> str:
    return f"{dtype} of shape {tuple(shape)}"  # type: ignore[arg-type]


def check_item(name: str, own: Any, found: Any) -> None:
    """Refuse an item of another kind than the pipeline's own, so that nothing fails once it is loaded.

    Raises:
        RequestError: it is of another kind, or a number is out of range.
    """
    if isinstance(own, Mapping) and isinstance(found, Mapping) and all(isinstance(key, str) for key in own):
        for key in {**own, **found}:
            check_item(f"{name}.{str(key)[:100]}", own.get(key, NOTHING), found.get(key, NOTHING))
    elif isinstance(own, list | tuple) and isinstance(found, list | tuple) and len(own) == len(found):
        for place, pair in enumerate(zip(own, found, strict=True)):
            check_item(f"{name}[{place}]", *pair)
    elif name == "progress.seed" or (name.startswith(("progress.", "ema.")) and name.endswith(_COUNTS)):
        least = -(1 << 63) if name == "progress.seed" else 0
        if type(found) is not int or not least <= found < 1 << 63:
            raise _refusal(name, f"a number of steps or a seed, from {least}, below 2⁶³", found)
    elif own is NOTHING or isinstance(own, list | tuple) or not _is_like(own, found):
        wanted = _text(own.shape, own.dtype) if isinstance(own, Tensor) else short(own)
        raise _refusal(name, f"as in the pipeline, {wanted}", found)


_COUNTS = (".steps", ".updates", ".evaluations")


def _is_like(own: Any, found: Any) -> bool:
    """Whether a value that is no collection of values by name is of the same kind."""
    if own is None:
        return found is None or _is_number(found) or isinstance(found, bool | str)
    if isinstance(own, bool):
        return found is None or isinstance(found, bool)
    if isinstance(own, Tensor):
        return isinstance(found, Tensor) and (own.shape, own.dtype) == (found.shape, found.dtype)
    if isinstance(own, Mapping):  # such as the milestones of MultiStepLR
        return isinstance(found, Mapping) and all(map(_is_number, (*found.keys(), *found.values())))
    return _is_number(found) if _is_number(own) else type(found) is type(own)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 64)


def _refusal(name: str, wanted: str, found: Any) -> RequestError:
    there = _text(found.shape, found.dtype) if isinstance(found, Tensor) else short(found)
    return RequestError(f"'{name[:200]}' is {there} in the checkpoint and must be {wanted}: {_OTHER}")
