"""What watches training: reports of steps, files of them, and log records with rank and stage."""

from .core.logs import LogContext
from .runtimes.monitor.json_lines import JsonLines
from .runtimes.monitor.records import DeviceReport, StepReport
from .runtimes.monitor.tensorboard import TensorBoard

__all__ = ["DeviceReport", "JsonLines", "LogContext", "StepReport", "TensorBoard"]
