"""Checkpoints of torch.distributed.checkpoint: written by its own writer, and never read by panpipe."""

import json
import warnings

import panpipe
import pytest
import torch
import torch.distributed.checkpoint as dcp
from panpipe.cli import main
from panpipe.runtimes.checkpoint.checkpoints import export_checkpoint
from panpipe.runtimes.checkpoint.reading import CheckpointReader
from panpipe.runtimes.checkpoint.state_parts import parts_of
from panpipe.runtimes.checkpoint.writing import Save, begin_save
from panpipe.runtimes.launch.team import ONE_PROCESS

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


def test_a_checkpoint_of_dcp_is_not_read(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"pipe": STATE}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(panpipe.RequestError, match=r"a checkpoint of torch\.distributed\.checkpoint, whose"):
        CheckpointReader(tmp_path)


def test_wrong_arguments_of_the_command_are_refused(tmp_path, capsys):
    assert main(["checkpoint", "check", str(tmp_path), str(tmp_path)]) == 2
    assert main(["checkpoint", "export", str(tmp_path)]) == 2
    assert main(["checkpoint", "check", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == ["panpipe"] * 3
    assert "takes FOLDER alone" in said[0]
    assert "takes FOLDER and TARGET, a new folder" in said[1]
    assert "there is no whole checkpoint" in said[2]
