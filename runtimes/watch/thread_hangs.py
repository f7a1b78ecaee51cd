"""Hangs between devices that are threads of one process: found by the thread that waits for them, and raised there."""

import atexit
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

from ...core.errors import WorkerError
from .activity import Activity, QuietTime
from .positions import Position, hangs, reason_of_hang, table
from .uncaught import end_process

_POLL_S = 0.5


class ThreadHangs:
    """Waits for devices, and finds those that hang.

    Args:
        activities: device → what it does.
        timeout_s: the limit on waiting without progress.
    """

    def __init__(self, activities: Mapping[int, Activity], timeout_s: float) -> None:
        self._activities, self._timeout_s = activities, timeout_s
        self._poll_s = min(_POLL_S, timeout_s / 8)
        self._quiet = {device: QuietTime(4 * self._poll_s) for device in activities}
        self._hang: WorkerError | None = None

    def refuse_after_hang(self) -> None:
        """Raise the error of an earlier hang: its thread still runs."""
        if self._hang is not None:
            raise self._hang

    def where(self) -> str:
        """Where every device is, a line for each. Times are those since the devices were last looked at."""
        found = {device: self._position(device, quiet, False) for device, quiet in self._quiet.items()}
        return f"devices of this process\n{table(found, found, 'device')}"

    def wait(self, running: Mapping[int, "Future[Any]"]) -> WorkerError | None:
        """Wait until all devices are done.

        Args:
            running: device → its work, which raises nothing.

        Returns:
            The error if a device hangs; the thread of another device then still runs.
        """
        _, undone = wait(running.values(), self._poll_s)
        quiet = self._quiet
        while undone:
            _, undone = wait(running.values(), self._poll_s)
            found = {device: self._position(device, quiet[device], running[device].done()) for device in running}
            late = next((device for device in found if hangs(device, found, self._timeout_s)), None)
            if undone and late is not None:
                self._hang = WorkerError(reason_of_hang(late, found, self._timeout_s, "device"))
                atexit.register(end_process)
                return self._hang
        return None

    def _position(self, device: int, quiet: QuietTime, done: bool) -> Position:
        activity = self._activities[device]
        if done:
            return Position(f"done with {activity.method}", activity.stages, quiet_s=self._timeout_s)
        quiet_s = quiet.update((activity.count, activity.on))
        line = activity.line() if quiet_s >= 1 and not activity.on else ""
        return Position(activity.text(), activity.stages, activity.on, quiet_s, line)
