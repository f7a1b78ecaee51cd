"""panpipe: automatic pipeline parallelism for PyTorch. One plan, predicted and then run."""

import os
import random
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core.errors import warn_caller
from .core.garbage import rare_collections

if TYPE_CHECKING:
    __version__: str
    from . import monitors as monitors
    from . import schedules as schedules
    from . import traces as traces
    from . import weights as weights
    from .api import pipeline as pipeline
    from .core.errors import InfeasibleError as InfeasibleError
    from .core.errors import NonFiniteError as NonFiniteError
    from .core.errors import PanpipeError as PanpipeError
    from .core.errors import RequestError as RequestError
    from .core.errors import WorkerError as WorkerError
    from .core.plan.plan import Plan as Plan
    from .core.plan.plan import plan_json as plan_json
    from .core.plan.plan import read_plan as read_plan
    from .core.validation.validate import validate as validate
    from .runtimes.checkpoint.writing import latest_checkpoint as latest_checkpoint
    from .runtimes.devices.heap import empty_weights as empty_weights
    from .runtimes.diagnose.parity import reference_step as reference_step
    from .runtimes.pipeline import Pipeline as Pipeline
    from .runtimes.settings import Auto as Auto
    from .runtimes.settings import Memory as Memory
    from .runtimes.settings import Run as Run
    from .runtimes.settings import Update as Update
    from .simulators.run import simulate as simulate


def _request_connections() -> None:
    """Request all 32 hardware queues of a GPU, unless the user has chosen a number (``backends/nccl.py``)."""
    if "CUDA_DEVICE_MAX_CONNECTIONS" in os.environ:
        return
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        return
    warn_caller(
        "CUDA was initialized before panpipe was imported, so streams share 8 hardware queues and a message that waits "
        "may stop compute: import panpipe first, or set CUDA_DEVICE_MAX_CONNECTIONS=32"
    )


_request_connections()

_HOME = {
    "Auto": "runtimes.settings",
    "InfeasibleError": "core.errors",
    "Memory": "runtimes.settings",
    "NonFiniteError": "core.errors",
    "PanpipeError": "core.errors",
    "Pipeline": "runtimes.pipeline",
    "Plan": "core.plan.plan",
    "RequestError": "core.errors",
    "Run": "runtimes.settings",
    "Update": "runtimes.settings",
    "WorkerError": "core.errors",
    "empty_weights": "runtimes.devices.heap",
    "latest_checkpoint": "runtimes.checkpoint.writing",
    "pipeline": "api",
    "plan_json": "core.plan.plan",
    "read_plan": "core.plan.plan",
    "reference_step": "runtimes.diagnose.parity",
    "simulate": "simulators.run",
    "validate": "core.validation.validate",
}
"""The public face: each name and the module that defines it. Names are loaded on first use, so that commands which do
not need torch start without it, and so that pytest may import this file under another name."""

PARTS = ("monitors", "schedules", "traces", "weights")
"""Modules with further names, each for one purpose."""

__all__ = list(_HOME) + list(PARTS)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module(".core.version", __name__).version()
    if name not in __all__:
        raise AttributeError(f"module 'panpipe' has no attribute '{name}'; it has {', '.join(__all__)}")
    state = random.getstate()  # some of the packages that are imported draw random numbers
    try:
        with rare_collections():  # imports allocate much and free nothing
            if name in PARTS:
                return import_module(f".{name}", __name__)
            return getattr(import_module(f".{_HOME[name]}", __name__), name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
