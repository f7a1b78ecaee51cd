"""What a signal prints: where every pipeline that is alive is; handlers of the user are kept."""

import gc
import os
import signal

import pytest
from panpipe.runtimes.watch import process
from panpipe.runtimes.watch.process import SIGNAL, WhereOnSignal


class Pipeline:
    def __init__(self, text):
        self.text = text

    def where(self):
        return self.text


@pytest.fixture
def where(monkeypatch):
    """An object of its own, with the process's handler and wakeup descriptor put back afterwards."""
    monkeypatch.setattr(process, "_AGAIN_S", 0.0)
    handler, descriptor = signal.getsignal(SIGNAL), signal.set_wakeup_fd(-1)
    signal.signal(SIGNAL, signal.SIG_DFL)
    found = WhereOnSignal()
    yield found
    mine = signal.set_wakeup_fd(descriptor)
    signal.signal(SIGNAL, handler)
    if found._received is not None:
        os.close(found._received)
        os.close(mine)


def test_every_live_pipeline_is_printed(where, capfd):
    first, second = Pipeline("rank 0 is in step 1"), Pipeline("rank 1 is in step 2")
    where.add(first)
    where.add(second)
    where.print()
    lines = capfd.readouterr().err.splitlines()
    assert {line.partition("rank")[2] for line in lines} == {" 0 is in step 1", " 1 is in step 2"}
    assert all(line.startswith("panpipe: 20") for line in lines)
    where.remove(first)
    del second
    gc.collect()
    where.print()
    assert capfd.readouterr().err.endswith("no pipeline is open here\n")


def test_handler_of_the_user_is_left_as_it_is(where):
    def own(number, frame):
        pass

    signal.signal(SIGNAL, own)
    where.install()
    assert signal.getsignal(SIGNAL) is own
    assert where._received is None
