"""Files that a step writes: nothing lands in them while it is captured, and a line says so."""

import logging
import warnings

import pytest
import torch
from panpipe.core.capture.batch.find_batch_dims import find_batch_dims
from panpipe.core.capture.export.step import capture_step
from torch import nn

from ....support.programs.changing import names_a_line

opened = []


@pytest.fixture(autouse=True)
def files_closed():
    yield
    while opened:
        opened.pop().close()


def written_by_open(path):
    def write(loss):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{loss.item()}\n")

    return write


def printed(path):
    def write(loss):
        with path.open("a", encoding="utf-8") as file:
            print(loss.item(), file=file)

    return write


def written_whole(path):
    return lambda loss: path.write_text(str(loss.item()), encoding="utf-8")


def written_to_an_open_file(path):
    file = path.open("a", encoding="utf-8")
    opened.append(file)
    return lambda loss: file.write(f"{loss.item()}\n")


def saved_by_torch(path):
    return lambda loss: torch.save(loss, path)


def saved_by_torch_into_a_file(path):
    def write(loss):
        with open(path, "wb") as file:
            torch.save({"loss": loss}, file)

    return write


def logged(path):
    logger = logging.getLogger("a log file of the step")

    def write(loss):
        handler = logging.FileHandler(path)
        logger.addHandler(handler)
        logger.warning("%.3f", loss.item())
        logger.removeHandler(handler)
        handler.close()

    return write


def test_a_log_file_that_the_step_opens_is_warned_of_with_what_to_do(tmp_path):
    write = logged(tmp_path / "log")

    def step(m, b):
        loss = m(b["x"]).square().mean()
        write(loss)
        return loss

    with pytest.warns(UserWarning, match="the step opens a log file here: .*add the handler before training"):
        capture_step(nn.Linear(2, 2), step, {"x": torch.randn(4, 2)})
    assert not (tmp_path / "log").exists()


def test_a_log_file_that_was_open_before_is_written_for_each_microbatch_alone(tmp_path):
    handler, logger = logging.FileHandler(tmp_path / "log"), logging.getLogger("a log file")
    opened.append(handler)
    logger.addHandler(handler)

    def step(m, b):
        loss = m(b["x"]).square().mean()
        logger.warning("%.3f", loss.item())
        return loss

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            capture_step(nn.Linear(2, 2), step, {"x": torch.randn(4, 2)})
    finally:
        logger.removeHandler(handler)
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize(
    "make",
    [
        written_by_open, printed, written_whole, written_to_an_open_file, saved_by_torch, saved_by_torch_into_a_file,
    ],
)  # fmt: skip
def test_capture_writes_no_file_and_warns_with_the_line(make, tmp_path):
    path = tmp_path / "log"
    path.write_text("before\n", encoding="utf-8")
    write, batch = make(path), {"x": torch.randn(4, 2)}

    def step(m, b):
        loss = m(b["x"]).square().mean()
        write(loss)
        return loss

    model = nn.Linear(2, 2)
    find_batch_dims(model, step, batch)
    with pytest.warns(UserWarning, match="the step writes a file here") as said:
        capture_step(model, step, batch)
    assert path.read_text(encoding="utf-8") == "before\n"
    assert all(names_a_line(f"{one.filename}:{one.lineno}", __file__) for one in said)
