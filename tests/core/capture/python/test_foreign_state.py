"""Databases and other states that nothing can compare: a step that asks for one is refused with the line."""

import csv
import datetime
import io
import queue
import re
import sqlite3
import threading

import pytest
import torch
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import nn
from torch.nn import functional as F

from ....support.programs.changing import names_a_line


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def fit(m, b):
    return F.mse_loss(m(b["x"]), b["x"])


def captured(m, step):
    return capture_step(m, step, {"x": torch.randn(2, 4)})


def test_database_that_the_step_asks_is_refused_with_the_line():
    connection = sqlite3.connect(":memory:")
    connection.execute("create table weights(value real)")
    connection.execute("insert into weights values (2.0)")

    def step(m, b):
        return fit(m, b) * connection.execute("select value from weights").fetchone()[0]

    with pytest.raises(RequestError, match=r"it calls sqlite3.Connection.execute, whose state cannot be") as refusal:
        captured(model(), step)
    assert names_a_line(str(refusal.value), __file__)


def test_database_that_the_step_opens_is_refused_with_the_line(tmp_path):
    def step(m, b):
        return fit(m, b) * (1 + sqlite3.connect(tmp_path / "values").total_changes)

    with pytest.raises(RequestError, match=r"it calls sqlite3.connect, whose state cannot be compared") as refusal:
        captured(model(), step)
    assert names_a_line(str(refusal.value), __file__)


def test_queues_tables_and_locks_may_be_written_and_not_read():
    table, waiting = csv.writer(io.StringIO()), queue.SimpleQueue()

    def logs(m, b):
        table.writerow(["loss"])
        waiting.put("loss")
        return fit(m, b)

    def asks(m, b):
        return fit(m, b) * (1 + waiting.qsize())

    captured(model(), logs)
    with pytest.raises(RequestError, match=r"it calls _queue.SimpleQueue.qsize, whose state cannot be"):
        captured(model(), asks)


def test_objects_in_c_that_only_compute_are_no_foreign_state():
    pattern, moment, lock = re.compile("a"), datetime.datetime(2020, 1, 1), threading.Lock()

    def step(m, b):
        with lock:
            return fit(m, b) * len(pattern.findall("aa")) * moment.weekday()

    captured(model(), step)
