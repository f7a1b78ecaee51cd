"""Log records have the rank, the stages and the step."""

import logging
import threading

import panpipe
import pytest
from panpipe.core import logs


@pytest.fixture(autouse=True)
def _restored():
    before = dict(vars(logs._process))
    yield
    vars(logs._process).clear()
    vars(logs._process).update(before)


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
        self.setFormatter(logging.Formatter("%(rank)s %(stage)s %(step)s %(message)s"))

    def emit(self, record):
        self.lines.append(self.format(record))


def test_records_have_rank_stage_and_step():
    handler = Kept()
    logs.LOGGER.addHandler(handler)
    try:
        logs.set_process(3, [2, 0], 7)
        logs.LOGGER.warning("first")

        def device():
            logs.set_thread([2])
            logs.LOGGER.warning("of a device")

        thread = threading.Thread(target=device)
        thread.start()
        thread.join()
    finally:
        logs.LOGGER.removeHandler(handler)
    assert handler.lines == ["3 0,2 7 first", "3 2 7 of a device"]


def test_handlers_with_the_filter_add_it_to_records_of_other_loggers():
    handler = Kept()
    handler.addFilter(panpipe.monitors.LogContext())
    logger = logging.getLogger("a training script of operators")
    logger.addHandler(handler)
    logs.set_process(1, [], 0)
    logger.warning("mine")
    logger.warning("own", extra={"step": "ten"})
    assert handler.lines == ["1 - 0 mine", "1 - ten own"]
