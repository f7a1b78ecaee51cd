"""Suppression of torch's own logging while a step is captured, because panpipe reports a failure in one line."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch._logging import _internal


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Within this context torch logs nothing, unless the user enabled it: by ``TORCH_LOGS``,
    ``torch._logging.set_logs`` or a level below WARNING of the logger "torch". No logger is changed."""
    if _is_enabled():
        yield
        return
    handle = logging.Logger.handle

    def pass_on(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.name != "torch" and not record.name.startswith("torch."):
            handle(logger, record)

    with mock.patch.object(logging.Logger, "handle", pass_on):
        yield


def _is_enabled() -> bool:
    state = _internal.log_state
    level = logging.getLogger("torch").level
    by_function = state.log_qname_to_level or state.artifact_names
    return bool("TORCH_LOGS" in os.environ or by_function or logging.NOTSET < level < logging.WARNING)
