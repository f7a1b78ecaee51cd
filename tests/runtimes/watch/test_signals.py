"""What a signal prints: the text of every describer that is alive, from a thread; handlers of the user are kept."""

import gc
import os
import signal
import threading
import time

import pytest
from panpipe.runtimes.watch import signals
from panpipe.runtimes.watch.signals import SIGNAL, Describer, WhereOnSignal


@pytest.fixture
def where():
    """An object of its own, with the process's handler and wakeup descriptor put back afterwards."""
    handler, descriptor = signal.getsignal(SIGNAL), signal.set_wakeup_fd(-1)
    signal.signal(SIGNAL, signal.SIG_DFL)
    found, others = WhereOnSignal(), set(threading.enumerate())
    yield found
    signal.set_wakeup_fd(descriptor)
    signal.signal(SIGNAL, handler)
    if found._sockets is not None:
        here, there = found._sockets
        there.close()  # the thread reads the end, and ends
        for thread in set(threading.enumerate()) - others:
            thread.join()
        here.close()


def test_every_live_describer_is_printed(where, capfd):
    first, second = Describer(lambda: "rank 0 is in step 1"), Describer(lambda: "rank 1 is in step 2")
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


def test_signal_is_printed_by_a_thread(where, capfd, monkeypatch):
    monkeypatch.setattr(signals, "_AGAIN_S", 60.0)
    printed = threading.Event()

    def text():
        printed.set()
        return f"printed in {threading.current_thread().name}"

    describer = Describer(text)
    where.add(describer)
    where.install()
    where.install()  # once is enough
    os.kill(os.getpid(), SIGNAL)
    assert printed.wait(10)
    os.kill(os.getpid(), SIGNAL)  # too soon after the first one
    deadline = time.monotonic() + 10
    seen = ""
    while "panpipe signals" not in seen and time.monotonic() < deadline:
        seen += capfd.readouterr().err
        time.sleep(0.01)
    assert seen.count("printed in panpipe signals") == 1


def test_handler_of_the_user_is_left_as_it_is(where):
    def own(number, frame):
        pass

    signal.signal(SIGNAL, own)
    where.install()
    assert signal.getsignal(SIGNAL) is own
    assert where._sockets is None


def test_other_threads_install_nothing(where):
    thread = threading.Thread(target=where.install)
    thread.start()
    thread.join()
    assert signal.getsignal(SIGNAL) is signal.SIG_DFL
