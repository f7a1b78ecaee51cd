"""Saving: while training continues, on ranks, in series of folders, exported for torch; and files that do not fit."""

import json
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import panpipe
import pytest
import torch
import torch.distributed.checkpoint as dcp
from panpipe.cli import main
from panpipe.core.errors import RequestError
from panpipe.runtimes.checkpoint import checkpoints
from panpipe.runtimes.checkpoint.checkpoints import export_checkpoint
from panpipe.runtimes.checkpoint.manifest import MANIFEST_NAME, manifest_bytes
from panpipe.runtimes.checkpoint.reading import CheckpointReader, Parts, parts_of
from panpipe.runtimes.checkpoint.writing import Save, begin_save, hidden_folder, write_tensor_file
from panpipe.runtimes.launch.team import ONE_PROCESS, Exchange

from ...support.launch import results
from ...support.programs.optimizing import everything, pipe_of, train, warm_up
from ...support.training import unequal

# Saving while training continues: one at a time, with the state of the moment of the call, and errors later.


CONV = "batchnorm with a skip"


@pytest.fixture
def held(monkeypatch):
    """Saves in the background begin to write when this event is set."""
    allowed, run = threading.Event(), Save.run

    def wait(self, exchange):
        if threading.current_thread() is not threading.main_thread():
            assert allowed.wait(60)
        run(self, exchange)

    monkeypatch.setattr(checkpoints.Save, "run", wait)
    yield allowed
    allowed.set()


def test_a_checkpoint_has_the_state_of_the_call_while_training_continues(held, tmp_path):
    pipe = pipe_of(CONV, scheduler=warm_up)
    train(pipe, CONV, 1)
    wanted = {name: tensor.clone() for name, tensor in everything(pipe).items()}
    pipe.checkpoint(tmp_path / "step-1", wait=False)
    losses = train(pipe, CONV, 2)
    assert panpipe.latest_checkpoint(tmp_path) is None
    held.set()
    pipe.checkpoint(tmp_path / "step-3")  # waits for the one before
    assert panpipe.latest_checkpoint(tmp_path) == tmp_path / "step-3"
    pipe.resume(tmp_path / "step-1")
    assert unequal(everything(pipe), wanted) == []
    assert train(pipe, CONV, 2) == losses


@pytest.mark.parametrize("later", ["step", "checkpoint", "resume", "wait_for_checkpoint", "close"])
def test_an_error_of_a_save_is_logged_at_once_and_raised_by_the_next_call(held, tmp_path, later, caplog):
    pipe = pipe_of(CONV)
    pipe.checkpoint(tmp_path / "step-0")
    pipe.checkpoint(tmp_path / "sub" / "step-1", wait=False)
    (hidden,) = (tmp_path / "sub").iterdir()
    hidden.rmdir()  # a disk that is gone
    train(pipe, CONV, 1)
    held.set()
    assert pipe._session.checkpoints._in_flight._done.exception() is not None
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "step-1' cannot be written" in caplog.text
    calls = {
        "step": lambda: train(pipe, CONV, 1),
        "checkpoint": lambda: pipe.checkpoint(tmp_path / "step-2"),
        "resume": lambda: pipe.resume(tmp_path / "step-0"),
        "wait_for_checkpoint": pipe._session.checkpoints.wait,
        "close": pipe.close,
    }
    with pytest.raises(panpipe.RequestError, match=r"\A[^\n]*step-1' cannot be written: No such file[^\n]*\Z"):
        calls[later]()
    assert not (tmp_path / "step-2").exists()
    assert pipe.metrics.steps == 1
    if later != "close":
        train(pipe, CONV, 1)  # raised once
        pipe.checkpoint(tmp_path / "step-2")
    pipe.close()


def test_a_with_block_that_fails_does_not_wait_for_the_save(held, tmp_path):
    def fails():
        with pipe_of(CONV) as pipe:
            pipe.checkpoint(tmp_path / "step-1", wait=False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert panpipe.latest_checkpoint(tmp_path) is None
    held.set()


# Checkpoints of ranks: written while they train, and refused by all of them if one refuses.


@pytest.fixture(scope="module")
def saving(tmp_path_factory):
    return results("saving", tmp_path_factory.mktemp("saving"))


def test_ranks_train_on_while_a_checkpoint_is_written(saving):
    for found in saving:
        assert found["again"]
        assert found["files"] == [
            "manifest.json",
            "tensors-00001-of-00002.safetensors",
            "tensors-00002-of-00002.safetensors",
        ]


def test_a_file_that_one_rank_refuses_is_refused_by_all_with_the_same_line(saving):
    first, second = saving
    said = "own1/tensors-00002-of-00002.safetensors' was changed since it was written: its hash differs"
    assert said in first["flipped on rank 1"]
    assert re.match(
        r"rank 1 has another checkpoint, in 'step-\d', than rank 0, in 'step-\d': ", first["another on rank 1"]
    )
    assert first["another on rank 1"] == second["another on rank 1"]
    assert first["flipped on rank 1"] == second["flipped on rank 1"]


def test_a_checkpoint_that_one_rank_cannot_write_fails_on_all(saving):
    first, second = saving
    for case in ("written on rank 0 alone", "later"):
        assert "step-3' cannot be written: one of its files is larger" in first[case]
        assert first[case] == second[case]
    assert "other1/a' cannot be written: No such file or directory; give a folder" in first["folder of rank 1"]
    assert first["folder of rank 1"] == second["folder of rank 1"]
    assert first["refused at"] == second["refused at"]
    assert first["left"] == second["left"] == ["step-3"]


def test_files_that_are_not_in_one_folder_are_noticed(tmp_path):
    """By two processes, as threads, of which the second one has another folder of the same name."""
    path, values, barrier = tmp_path / "step-7", [None, None], threading.Barrier(2, timeout=20)
    hidden = begin_save(path)
    (tmp_path / "elsewhere" / hidden).mkdir(parents=True)

    def work(number):
        def gather(value):
            values[number] = value
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

        parts = Parts({f"model.p{number}": torch.ones(2)}, {"progress.steps": 7})
        own = path if number == 0 else tmp_path / "elsewhere" / path.name
        with pytest.raises(RequestError, match="it is not one folder on all ranks"):
            Save(own, hidden, parts, 7, None, 2).run(Exchange(number, 2, gather))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert not path.exists()


# The last checkpoint of a folder, and the removal of older ones.


def checkpoint(folder, steps=1):
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).write_bytes(manifest_bytes(steps, {}, {"progress.steps": steps}))
    return folder


@pytest.mark.parametrize("killed_while_it", ["writes", "removes"])
def test_what_a_killed_process_left_is_removed_by_the_next_save_of_the_series(tmp_path, killed_while_it):
    """A job that resumes may never write a checkpoint of the same number again."""
    long = "x" * 120
    for name in ("step-7", f"{long}-7", "best-7", "steps-7", "step-7-7"):
        left = hidden_folder(tmp_path / name)
        if killed_while_it == "removes":
            left.rmdir()
            checkpoint(left)
    assert begin_save(tmp_path / "step-9").startswith(".partial-step-9-")
    assert begin_save(tmp_path / f"{long}-9").startswith(".partial-xxx")
    kept = sorted(path.name.removeprefix(".partial-").rpartition("-")[0] for path in tmp_path.iterdir())
    assert kept == ["best-7", "step-7-7", "step-9", "steps-7", "x" * 100]


# Reading a checkpoint: parts by name, and files that do not fit.


def written(folder, *tensors, stored_as_bytes=None):
    files, dtypes = {}, {}
    for number, own in enumerate(tensors, start=1):
        name = f"tensors-{number:05d}-of-{len(tensors):05d}.safetensors"
        files[name], others = write_tensor_file(folder / name, own)
        dtypes |= others
    (folder / MANIFEST_NAME).write_bytes(manifest_bytes(1, files, {}, stored_as_bytes or dtypes))
    return folder


def test_bytes_that_do_not_fit_their_dtype_are_refused(tmp_path):
    narrow = {"model.z": torch.ones(2, dtype=torch.complex64)}
    wide = written(tmp_path, narrow, stored_as_bytes={"model.z": torch.complex128})
    with pytest.raises(RequestError, match=r"'model\.z' does not have the bytes of torch\.complex128"):
        CheckpointReader(wide)


# Checkpoints of torch.distributed.checkpoint: written by its own writer.


STATE = {
    "model": {"a.weight": torch.randn(3, 4), "a.bias": torch.randn(3, dtype=torch.complex128)},
    "optimizer": {"param_groups.a.bias.lr": torch.tensor(0.5), "param_groups.a.bias.betas": (0.9, 0.95)},
    "stepped": {"a.bias": True},
    "scheduler": ("MultiStepLR", {"milestones": {1: 2}, "last_epoch": 1}),
    "progress": {"steps": 4, "updates": 3, "evaluations": 0, "seed": 1},
}


def test_an_exported_checkpoint_has_the_same_values(tmp_path, capsys):
    folder = tmp_path / "step-4"
    Save(folder, begin_save(folder), parts_of(STATE), 4, None, 1).run(ONE_PROCESS)
    assert main(["checkpoint", "check", str(tmp_path / "step-4"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["tensors"], len(found["files"])) == (4, 2, 1)
    assert panpipe.latest_checkpoint(tmp_path) == tmp_path / "step-4"
    assert main(["checkpoint", "export", str(folder), str(tmp_path / "again")]) == 0
    state = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in STATE["model"].items()},
        "optimizer": {"param_groups.a.bias.lr": torch.zeros(()), "param_groups.a.bias.betas": None},
        "stepped": {"a.bias": None},
        "scheduler": None,
        "progress": dict.fromkeys(STATE["progress"]),
    }
    dcp.load({"pipe": state}, checkpoint_id=tmp_path / "again", no_dist=True)
    assert all(torch.equal(tensor, STATE["model"][name]) for name, tensor in state["model"].items())
    assert state["optimizer"] == STATE["optimizer"]
    assert {name: state[name] for name in ("stepped", "scheduler", "progress")} == {
        name: STATE[name] for name in ("stepped", "scheduler", "progress")
    }
    with pytest.raises(panpipe.RequestError, match="holds a checkpoint: give a new folder"):
        export_checkpoint(tmp_path / "step-4", tmp_path / "again")


def test_wrong_arguments_of_the_command_are_refused(tmp_path, capsys):
    assert main(["checkpoint", "check", str(tmp_path), str(tmp_path)]) == 2
    assert main(["checkpoint", "export", str(tmp_path)]) == 2
    assert main(["checkpoint", "check", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == ["panpipe"] * 3
    assert "takes FOLDER alone" in said[0]
    assert "takes FOLDER and TARGET, a new folder" in said[1]
    assert "there is no whole checkpoint" in said[2]
