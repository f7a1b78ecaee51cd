"""Whether a checkpoint fits a pipeline: checked before anything of the pipeline changes."""

from torch import Tensor

from ...core.errors import RequestError
from .item_kinds import check_class_and_state, check_item
from .reading import CheckpointReader
from .state_parts import Parts, state_of
from .training_state import TrainingState
from .whole_parts import PartReader


def fitted(own: Parts, reader: CheckpointReader | PartReader, training: TrainingState) -> Parts:
    """The parts that a pipeline loads: its own tensors, which are to be overwritten, and the checkpoint's items.

    Args:
        own: the pipeline's parts.
        reader: the checkpoint.
        training: the pipeline's state.

    Raises:
        RequestError: the checkpoint is of another model, optimizer or scheduler, or was not written by panpipe.
    """
    _check_sections(own, reader, training)
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
    training.packed(state_of(parts))
    return parts


def _check_sections(own: Parts, reader: CheckpointReader | PartReader, training: TrainingState) -> None:
    """Refuse other classes and names with the messages of `TrainingState`, which name models and optimizers."""
    for name in ("scheduler", "scaler"):
        if name in reader.items:
            check_class_and_state(name, reader.items[name])
    found = {name: reader.items[name] for name in ("scheduler",) if name in reader.items}
    optimizer = reader.items.get("progress.optimizer")
    training.check_classes({**found, "progress": {"optimizer": optimizer}})
    training.check({name: kept.shape for name, kept in reader.tensors.items()} | dict.fromkeys(reader.items))


_OTHER = "resume with the model and arguments that it was written with"


def _text(shape: object, dtype: object) -> str:
    return f"{dtype} of shape {tuple(shape)}"  # type: ignore[arg-type]
