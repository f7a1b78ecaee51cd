"""What watches training: reports of steps, files of them, and log records with rank and stage."""

from .core.logs import LogContext
from .runtimes.monitor.monitors import DeviceReport, JsonLines, StepReport, TensorBoard

__all__ = ["DeviceReport", "JsonLines", "LogContext", "StepReport", "TensorBoard"]
