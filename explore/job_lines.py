"""What jobs report while they run: lines with an answer, a point, progress, or an error."""

from typing import Any, Protocol


class Report(Protocol):
    """Reports a line of a job. It raises if the job was cancelled."""

    def __call__(self, **line: Any) -> None: ...


def progress(text: str, done: int = 0, of: int = 0) -> dict[str, Any]:
    """A line on how far a job is; ``of`` is 0 if that is not known."""
    return {"progress": {"text": text, "done": done, "of": of}}
