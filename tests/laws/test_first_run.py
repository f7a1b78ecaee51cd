"""The first run after an installation: a short step trains before anything is compiled."""

import os
import subprocess
import sys

from ..support.launch import HANGS_S

SCRIPT = """
import panpipe, torch
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)], nn.Linear(64, 10))
batch = {"x": torch.randn(32, 64), "y": torch.randint(10, (32,))}
step = lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"])
with panpipe.pipeline(model, step, batch, optimizer=torch.optim.AdamW, microbatches=4) as pipe:
    pipe.step(batch)
"""


def test_first_plan_of_a_short_step_compiles_nothing(tmp_path):
    folders = {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "PANPIPE_CACHE": str(tmp_path / "plans")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        check=False,
        env=os.environ | folders,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    assert "planned" in done.stderr
    assert "compiling" not in done.stderr
    assert not list((tmp_path).rglob("*.nbi"))
