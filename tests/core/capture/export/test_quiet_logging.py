"""What torch logs while a step is captured."""

import logging
from collections.abc import Iterator

import pytest
from panpipe.core.capture.export.quiet_logging import quiet_torch


@pytest.fixture
def records() -> Iterator[list[str]]:
    """Messages that reach the handlers of torch's loggers, and those of another library's."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger("torch.export"), logging.getLogger("torchvision")]
    for logger in loggers:
        logger.addHandler(handler)
    yield found
    for logger in loggers:
        logger.removeHandler(handler)


def log() -> None:
    logging.getLogger("torch.export").error("of torch")
    logging.getLogger("torchvision").error("of another library")


def test_torch_is_quiet_within_and_other_libraries_are_not(records: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    with quiet_torch():
        log()
    assert records == ["of another library"]
    log()
    assert records == ["of another library", "of torch", "of another library"]


def test_torch_logs_where_the_user_asks(records: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+export")
    with quiet_torch():
        log()
    assert records == ["of torch", "of another library"]


def test_torch_logs_with_a_lower_level(records: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with quiet_torch():
            log()
    finally:
        logger.setLevel(level)
    assert "of torch" in records
