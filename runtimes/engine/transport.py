"""Checks that a backend can move every tensor that a plan sends, before training."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ...backends.kind import BackendKind, dtype_name
from ...backends.registry import known_backends
from ...core.errors import RequestError
from ...core.plan.plan import Plan
from ..programs.linked_stage import Layout


def check_transport(
    kind: BackendKind, plan: Plan, layout: Layout, parameters: Mapping[str, Tensor], where: Mapping[int, torch.device]
) -> None:
    """Refuse a plan that would send tensors that its backend cannot move.

    Args:
        kind: the backend.
        plan: the plan.
        layout: the tensors of every message between stages.
        parameters: of the model, by name.
        where: device of this process → its torch device.

    Raises:
        RequestError: the backend does not move a dtype, or tensors on a type of device.
    """
    device = next((device for device in where.values() if device.type not in kind.device_types), None)
    if device is not None:
        types = ", ".join(sorted(kind.device_types))
        raise RequestError(
            f"the model is on {device} and backend '{kind.name}' can only move tensors on {types}: "
            f"{_others(other for other in known_backends().values() if device.type in other.device_types)}"
        )
    for name, dtype in _sent(plan, layout, parameters):
        if kind.dtypes is not None and dtype not in kind.dtypes:
            moved = ", ".join(sorted(map(dtype_name, kind.dtypes)))
            able = (other for other in known_backends().values() if other.dtypes is None or dtype in other.dtypes)
            raise RequestError(
                f"'{name}' goes between devices in {dtype_name(dtype)} and backend '{kind.name}' moves {moved}: "
                f"train in one of those, or {_others(able)}"
            )


def _sent(plan: Plan, layout: Layout, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, torch.dtype]]:
    """Name and dtype of every tensor that is sent between devices."""
    for (sender, reader), tensors in layout.items():
        if plan.placement[sender] != plan.placement[reader]:
            yield from ((tensor.name, tensor.dtype) for tensor in tensors)
    if plan.mesh.data > 1:
        yield from ((name, parameter.dtype) for name, parameter in parameters.items())
    for weight in plan.tied:
        if len({plan.placement[stage] for stage in weight.stages}) > 1:
            yield weight.name, parameters[weight.name].dtype


def _others(kinds: Iterable[BackendKind]) -> str:
    names = [kind.name for kind in kinds if kind.unavailable is None]
    return f"use {' or '.join(names)}" if names else "no backend here does"
