"""Failures of every class of panpipe's, and of those that users may write."""

import threading
from collections.abc import Callable
from typing import NoReturn

from attrs import evolve
from panpipe.core.capture.batch.batch_dims import DifferentRows
from panpipe.core.capture.regions.module_regions import CapturedOtherwise
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.errors import (
    InfeasibleError,
    NonFiniteError,
    OffloadError,
    PanpipeError,
    RequestError,
    WorkerError,
    message_of,
)
from panpipe.core.search.suggestions.infeasible import NothingFits

from .plans import scheduled


class Demanding(Exception):
    """Cannot be made from its arguments."""

    def __init__(self, code, *, reason):
        super().__init__()
        self.code, self.reason = code, reason

    def __str__(self):
        return f"code {self.code}: {self.reason}"


class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no text")


class Holder(ValueError):
    """Has what no process can give to another one."""

    def __init__(self, message):
        super().__init__(message)
        self.lock, self.function = threading.Lock(), lambda: None


class OwnRequest(RequestError):
    """A plug-in's: other arguments, another status."""

    exit_status = 7

    def __init__(self, *, field):
        super().__init__(f"field {field} is wrong")
        self.field = field


class OwnWorker(WorkerError):
    """Never calls the constructor of its family."""

    def __init__(self):
        Exception.__init__(self, "half a worker")


def nothing_fits() -> NothingFits:
    plan = scheduled("1f1b", 2, 4, cluster=fully_connected(2, 100, 1e9, 0.0))
    return NothingFits("device 1 needs 9 bytes and may hold 7", evolve(plan, model="größer"), (float("inf"), 7))


def cyclic() -> ValueError:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    return first


FAILURES: dict[str, Callable[[], Exception]] = {
    "PanpipeError": lambda: PanpipeError("something"),
    "RequestError": lambda: RequestError("the value, the rule and the fix"),
    "InfeasibleError": lambda: InfeasibleError("device 0 is full"),
    "WorkerError": lambda: WorkerError("one of ranks 1, 2 stopped answering", (1, 2)),
    "DifferentRows": lambda: DifferentRows("x has 8 rows and y has 4"),
    "NonFiniteError": lambda: NonFiniteError("the loss of step 3 is nan", 3, 1, 2),
    "OffloadError": lambda: OffloadError("offload of saved tensors failed: no space left"),
    "NothingFits": nothing_fits,
    "CapturedOtherwise": lambda: CapturedOtherwise("line: a module fails with what export gives it"),
    "a plug-in's request": lambda: OwnRequest(field="x"),
    "a plug-in's worker": OwnWorker,
    "an OSError": lambda: OSError("no such sample"),
    "a KeyError": lambda: KeyError("k"),
    "a UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "a demanding constructor": lambda: Demanding(3, reason="because"),
    "a lock inside": lambda: Holder("held"),
    "a cyclic cause": cyclic,
    "no message": Unprintable,
    "a group": lambda: ExceptionGroup("several", [Demanding(1, reason="a"), ValueError("b")]),
    "many lines": lambda: RequestError("first line\nsecond line"),
    "other alphabets": lambda: RequestError("größer als 日本語 🙂 \0"),
    "a surrogate": lambda: OSError("no file 'caf\udce9'"),
    "a huge message": lambda: RuntimeError("x" * 3_000_000),
    "a local class": lambda: type("Local", (Exception,), {})("made in a function"),
}


def throw(make: Callable[[], Exception]) -> NoReturn:
    raise make()


def described(failure: BaseException) -> dict[str, object]:
    """What is compared between ranks."""
    about: dict[str, object] = {
        "class": type(failure).__name__,
        "status": getattr(failure, "exit_status", 1),
        "size": len(message_of(failure)),
        "message": message_of(failure)[:300],
    }
    if isinstance(failure, WorkerError):
        about["suspects"] = list(getattr(failure, "suspects", ()))
    if isinstance(failure, NothingFits):
        about["closest"], about["limits"] = failure.closest.hash, [str(float(limit)) for limit in failure.limits]
        about["model"], about["prediction"] = failure.closest.model, str(failure.closest.prediction)
    return about
