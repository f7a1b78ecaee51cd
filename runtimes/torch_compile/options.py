"""The options of the backend of ``torch.compile``."""

from collections.abc import Mapping
from typing import Any

from attrs import field, fields, frozen

from ...core.errors import RequestError

_ORDER = "autograd decides when backwards run, so there is no plan of one step with forwards and backwards"
NEED_A_PLAN = dict.fromkeys(("offload", "offload_to", "host_memory", "recompute", "schedule", "plan"), _ORDER)
"""Options of ``panpipe.pipeline`` that this backend cannot have, with the reason."""


def _whole(instance: "Options", attribute: Any, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"option {attribute.name} is {value!r}: give a whole number, at least 1")


def _dims(instance: "Options", attribute: Any, value: object) -> None:
    if not isinstance(value, Mapping) or any(
        dim is not None and (dim != 0 or isinstance(dim, bool)) for dim in value.values()
    ):
        raise RequestError(
            f"option {attribute.name} is {value!r}: give the names of arguments with 0, where their samples are, or "
            "None for what all microbatches share, such as {'x': 0, 'mask': None}"
        )


@frozen
class Options:
    """``options`` of ``torch.compile``.

    Args:
        devices: number of threads and of stages.
        microbatches: number of microbatches that a batch is cut into, along dimension 0.
        batch_dims: name of an argument → 0 if that dimension has the samples, None if all microbatches share the
            argument. Other arguments have samples if their dimension 0 has the same size.
    """

    devices: int = field(default=2, validator=_whole)
    microbatches: int = field(default=4, validator=_whole)
    batch_dims: Mapping[str, int | None] = field(factory=dict, validator=_dims)


def read_options(given: Mapping[str, Any]) -> Options:
    """The options of ``torch.compile(..., options=)``.

    Raises:
        RequestError: one of them is unknown or invalid.
    """
    known = [one.name for one in fields(Options)]
    unknown = next((name for name in given if name not in known), None)
    if unknown in NEED_A_PLAN:
        raise RequestError(
            f"backend 'panpipe' has no option '{unknown}': {NEED_A_PLAN[unknown]}; give {unknown} to panpipe.pipeline, "
            "which has the loss and the optimizer"
        )
    if unknown is not None:
        raise RequestError(f"there is no option '{unknown}' of backend 'panpipe': known are {', '.join(known)}")
    return Options(**given)
