"""Files that a step writes: nothing lands in them while it is captured, and a line says so."""

import pytest
import torch
from panpipe.core.capture.batch.find_batch_dims import find_batch_dims
from panpipe.core.capture.export.step import capture_step
from torch import nn

from ....support.changing import names_a_line

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
