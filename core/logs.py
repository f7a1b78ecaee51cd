"""The logger ``panpipe``, whose records have the rank, the stages and the step of the process that logs.

panpipe installs no handler and sets no level. A handler of the user with the filter `LogContext` gets the same
attributes on all records, also on those of other loggers::

    handler.addFilter(panpipe.monitors.LogContext())
    handler.setFormatter(logging.Formatter("rank %(rank)s stage %(stage)s step %(step)s: %(message)s"))
"""

import logging
import threading
from collections.abc import Iterable

LOGGER = logging.getLogger("panpipe")
NONE = "-"
"""The value of an attribute that is not known: outside of a pipeline."""


class _Thread(threading.local):
    """The stages of a thread that is a device; None in other threads."""

    stage: str | None = None


class _Process:
    """The rank of this process, its stages and its current step."""

    rank: int | str = NONE
    stage: str = NONE
    step: int | str = NONE


_process, _thread = _Process(), _Thread()


class LogContext(logging.Filter):
    """Adds three attributes to log records, and passes all of them on.

    Attributes of a record:
        rank: of this process; 0 for a process that is no rank.
        stage: the numbers of this process's stages, such as ``"0,2"``; in the thread of a device those of the device.
        step: number of the current step, from 1; between steps that of the last one, 0 before the first.

    Each is ``"-"`` as long as this process has no pipeline. With several pipelines they are those of the last one that
    was built or trained.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes that the record does not have yet."""
        stage = _process.stage if _thread.stage is None else _thread.stage
        for name, value in (("rank", _process.rank), ("stage", stage), ("step", _process.step)):
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


LOGGER.addFilter(LogContext())


def set_process(rank: int, stages: Iterable[int], step: int) -> None:
    """Set the rank, the stages and the step of this process's records."""
    _process.rank, _process.stage, _process.step = rank, _listed(stages), step


def set_thread(stages: Iterable[int]) -> None:
    """Set the stages of this thread's records."""
    _thread.stage = _listed(stages)


def _listed(stages: Iterable[int]) -> str:
    return ",".join(map(str, sorted(stages))) or NONE
