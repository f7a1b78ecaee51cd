"""The kernels of a region (Python code that needs values), recorded while it runs once on stand-ins of its inputs."""

from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..capture.graph.storages import storage_sizes
from ..capture.regions.regions import Region, region_of
from ..capture.values.fake_tensors import stand_in_for
from ..errors import RequestError
from .kernels import Kernel, kernel_of
from .single_operator import LoneOperator

REGION_OPERATORS = (torch.ops.panpipe_region.run.default, torch.ops.panpipe_region.backward.default)
"""The operators of a region's forward and backward in a traced graph."""

_STAND_INS = 1 << 30
"""Most bytes of stand-ins for a region's inputs."""


@frozen
class RegionWork:
    """A region's kernels and memory for one microbatch.

    Args:
        forward, backward: kernels, in order; one backward computes all gradients.
        kept_bytes: of the tensors that its forward saves for its backward, without its inputs.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    kept_bytes: int


@define(slots=False)
class _Counted(TorchDispatchMode):
    """A dispatch mode that records the kernel of every call."""

    kernels: list[Kernel] = field(factory=list)

    def __attrs_pre_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = kernel_of(func, args, kwargs or {}, result)
        if found is not None:
            self.kernels.append(found)
        return result


def region_work(operator: LoneOperator, number: int) -> RegionWork:
    """Run a region once on random inputs of the shapes that it reads.

    Raises:
        RequestError: its inputs would be too large, or it does not run on random ones.
    """
    node = next(node for node in operator.members if region_of(node) is not None and node.args[1] == number)
    region: Region = region_of(node)  # type: ignore[assignment]
    fakes = [operator.operators.values[source.name] for source in node.all_input_nodes]
    size = sum(fake.nbytes for fake in fakes)
    if size > _STAND_INS:
        raise RequestError(
            f"{region.line}: '{region.name or 'the step'}' stays Python and reads {size / 1e9:.1f} GB: its costs need "
            "a run on at most 1 GiB of inputs; take the value out of that line, or plan for a smaller batch"
        )
    try:
        return _run(region, [stand_in_for(fake) for fake in fakes])
    except RequestError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RequestError(
            f"{region.line}: '{region.name or 'the step'}' stays Python and does not run on random inputs "
            f"({first[:160]}): its costs cannot be derived; measure them with --cluster cpu:N, or take "
            "the value out of that line"
        ) from error


def _run(region: Region, given: list[Tensor]) -> RegionWork:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with _Counted() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        *made, ticket = region.forward(given, None, 0)
    with _Counted() as backward:
        region.backward([torch.ones_like(tensor) for tensor in made], ticket)
    known = storage_sizes(given)
    kept = sum(size for key, size in storage_sizes(saved).items() if key not in known)
    return RegionWork(tuple(forward.kernels), tuple(backward.kernels), kept)
