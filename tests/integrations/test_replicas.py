"""Frameworks' ranks read the same batches, and replicas of a pipeline divide their rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.integrations.pipelines import ReplicaRows
from safetensors.torch import load_file
from torch import nn

from ..support.launch import torchrun_script

FRAMEWORKS = Path(__file__).parents[1] / "support" / "framework_runs.py"


def rows_of(monkeypatch, rank, mesh, batch):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    step = lambda model, batch: nn.functional.mse_loss(model(batch["x"].T), batch["y"])  # noqa: E731
    return ReplicaRows(nn.Linear(3, 1), step, batch, {"mesh": mesh, "batch_dims": {"x": 1}})


def batch_of(rows):
    """Samples along dimension 1 of x and 0 of y."""
    return {"x": torch.arange(3.0 * rows).view(3, rows), "y": torch.arange(1.0 * rows).view(rows, 1)}


@pytest.mark.parametrize(("mesh", "replicas"), [("dp=2,pp=2", (0, 0, 1, 1)), ("pp=2,dp=2", (0, 1, 0, 1))])
def test_each_replica_trains_on_its_own_rows(monkeypatch, mesh, replicas):
    whole = batch_of(7)
    for rank, replica in enumerate(replicas):
        part = rows_of(monkeypatch, rank, mesh, whole).trained(whole)
        own = slice(0, 4) if replica == 0 else slice(4, 7)
        assert torch.equal(part["x"], whole["x"][:, own])
        assert torch.equal(part["y"], whole["y"][own])


def test_batch_with_fewer_rows_than_replicas_is_refused_and_evaluated_by_each(monkeypatch):
    rows, one = rows_of(monkeypatch, 1, "pp=1,dp=4", batch_of(8)), batch_of(1)
    with pytest.raises(RequestError, match=r"fewer rows than the mesh has replicas, 4.*drop_last"):
        rows.trained(one)
    assert rows.evaluated(one) is one


@pytest.mark.slow
@pytest.mark.parametrize("names", ["transformers,resumed", "peft", "accelerate", "lightning"])
def test_framework_over_replicas_equals_one_process(tmp_path, names):
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    for folder in (alone, ranks):
        folder.mkdir()
    subprocess.run([sys.executable, str(FRAMEWORKS), str(alone), names], check=True, timeout=600)
    done = torchrun_script(FRAMEWORKS, str(ranks), names, ranks=4)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted, found = (json.loads((folder / "found.json").read_text(encoding="utf-8")) for folder in (alone, ranks))
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)
    for name in names.split(","):
        for one, other in zip(weights(ranks, name), weights(alone, name), strict=True):
            assert one.keys() == other.keys()
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


def weights(folder, name):
    """The weights that a framework saved."""
    if name == "lightning":  # without the strategy
        return [torch.load(folder / "lightning.ckpt")["state_dict"]]
    files = sorted((folder / name).glob("*.safetensors"))
    return [{key: value for file in files for key, value in load_file(file).items()}] if files else []
