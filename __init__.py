"""panpipe: automatic pipeline parallelism for PyTorch. One plan, predicted and then run."""

import os
import random
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from .api import pipeline as pipeline
    from .core.costs.costs import StageCosts as StageCosts
    from .core.errors import InfeasibleError as InfeasibleError
    from .core.errors import NonFiniteError as NonFiniteError
    from .core.errors import PanpipeError as PanpipeError
    from .core.errors import RequestError as RequestError
    from .core.errors import WorkerError as WorkerError
    from .core.logs import LogContext as LogContext
    from .core.plan.plan import Plan as Plan
    from .core.plan.plan import plan_json as plan_json
    from .core.plan.plan import read_plan as read_plan
    from .core.plan.validation.validate import validate as validate
    from .core.report.facts import Check as Check
    from .core.report.facts import Checked as Checked
    from .core.report.facts import ReportFacts as ReportFacts
    from .core.report.page import write_report as write_report
    from .core.schedules.problem import Schedule as Schedule
    from .core.schedules.problem import ScheduleProblem as ScheduleProblem
    from .core.schedules.registry import families as families
    from .core.schedules.registry import find_family as find_family
    from .core.schedules.scored import score as score
    from .core.search.orders.auto import find_schedule as find_schedule
    from .core.trace.compare import compare as compare
    from .core.trace.perfetto import write_trace as write_trace
    from .core.trace.perfetto_reader import read_trace as read_trace
    from .core.trace.trace import Trace as Trace
    from .runtimes.checkpoint.folders import latest_checkpoint as latest_checkpoint
    from .runtimes.devices.empty_weights import empty_weights as empty_weights
    from .runtimes.diagnose.reference import reference_step as reference_step
    from .runtimes.monitor.json_lines import JsonLines as JsonLines
    from .runtimes.monitor.records import DeviceReport as DeviceReport
    from .runtimes.monitor.records import StepReport as StepReport
    from .runtimes.monitor.tensorboard import TensorBoard as TensorBoard
    from .runtimes.pipeline import Pipeline as Pipeline
    from .runtimes.settings import Auto as Auto
    from .runtimes.settings import Memory as Memory
    from .runtimes.settings import Run as Run
    from .runtimes.settings import Update as Update
    from .simulators.run import simulate as simulate


def _request_connections() -> None:
    """Request all 32 hardware queues of a GPU, unless the user has chosen a number (``backends/connections.py``)."""
    if "CUDA_DEVICE_MAX_CONNECTIONS" in os.environ:
        return
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        return
    warnings.warn(
        "CUDA was initialized before panpipe was imported, so streams share 8 hardware queues and a message that waits "
        "may stop compute: import panpipe first, or set CUDA_DEVICE_MAX_CONNECTIONS=32",
        stacklevel=3,
    )


_request_connections()

_HOME = {
    "Auto": "runtimes.settings",
    "Check": "core.report.facts",
    "Checked": "core.report.facts",
    "DeviceReport": "runtimes.monitor.records",
    "InfeasibleError": "core.errors",
    "JsonLines": "runtimes.monitor.json_lines",
    "LogContext": "core.logs",
    "Memory": "runtimes.settings",
    "NonFiniteError": "core.errors",
    "PanpipeError": "core.errors",
    "Pipeline": "runtimes.pipeline",
    "Plan": "core.plan.plan",
    "ReportFacts": "core.report.facts",
    "RequestError": "core.errors",
    "Run": "runtimes.settings",
    "Schedule": "core.schedules.problem",
    "ScheduleProblem": "core.schedules.problem",
    "StageCosts": "core.costs.costs",
    "StepReport": "runtimes.monitor.records",
    "TensorBoard": "runtimes.monitor.tensorboard",
    "Trace": "core.trace.trace",
    "Update": "runtimes.settings",
    "WorkerError": "core.errors",
    "compare": "core.trace.compare",
    "empty_weights": "runtimes.devices.empty_weights",
    "families": "core.schedules.registry",
    "find_family": "core.schedules.registry",
    "find_schedule": "core.search.orders.auto",
    "latest_checkpoint": "runtimes.checkpoint.folders",
    "pipeline": "api",
    "plan_json": "core.plan.plan",
    "read_plan": "core.plan.plan",
    "read_trace": "core.trace.perfetto_reader",
    "reference_step": "runtimes.diagnose.reference",
    "score": "core.schedules.scored",
    "simulate": "simulators.run",
    "validate": "core.plan.validation.validate",
    "write_report": "core.report.page",
    "write_trace": "core.trace.perfetto",
}
"""The public face: each name and the module that defines it. Names are loaded on first use, so that commands which do
not need torch start without it, and so that pytest may import this file under another name."""

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module(".core.version", __name__).version()
    if name not in _HOME:
        raise AttributeError(f"module 'panpipe' has no attribute '{name}'; it has {', '.join(_HOME)}")
    state = random.getstate()  # some of the packages that are imported draw random numbers
    try:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
