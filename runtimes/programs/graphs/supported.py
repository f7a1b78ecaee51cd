"""What captured graphs support: refuses devices and plans without support, and names the stages that are left out."""

from collections.abc import Sequence

from ....core.errors import RequestError, warn_caller
from ....core.policies.sharding import LEVELS, part_of_gradients
from ..compiled import Compiled
from .graph_pool import has_graphs


def check_device(device_type: str) -> None:
    """Refuse devices that have no graphs.

    Args:
        device_type: of all stages, such as ``"cuda"``.

    Raises:
        RequestError: they have none.
    """
    if not has_graphs(device_type):
        raise RequestError(
            f"cuda_graphs=True needs CUDA devices, and the model would be on {device_type}: give devices='cuda' where "
            "there are GPUs, or leave cuda_graphs out"
        )


def check_plan(levels: Sequence[str], offloads: bool) -> None:
    """Refuse what graphs do not support.

    Args:
        levels: what replicas share; by stage, or as the user asked.
        offloads: whether saved tensors are offloaded. A graph reads one at the address at which the capture saved it.

    Raises:
        RequestError: saved tensors are offloaded; or replicas share gradients or parameters: gradients are then sent
            during a backward, and the memory of parameters moves.
    """
    found = next((level for level in levels if level in LEVELS and part_of_gradients(level)), None)
    if found is not None:
        raise RequestError(
            f"cuda_graphs=True does not support shard='{found}': backwards then communicate, and a graph repeats "
            "operators of one device alone; use Memory(shard='optimizer'), or leave cuda_graphs out"
        )
    if offloads:
        raise RequestError(
            "cuda_graphs=True does not support offload: graphs read saved tensors at fixed addresses, and an offloaded "
            "one comes back at another; use Memory(recompute=), or leave cuda_graphs out"
        )


def warn_of_ungraphed(compiled: Compiled) -> None:
    """Warn of the stages of this process that have no graphs; the others of their devices run without, too."""
    for stage, programs in compiled.programs.items():
        reason = programs.host_read and f"{programs.host_read} reads values on the host"
        if compiled.runs_python(stage):
            reason = "a part of it stays Python (`panpipe doctor` names the line)"
        if reason is not None:
            warn_caller(f"stage {stage} runs without CUDA graphs, as do all of its device: {reason}")
