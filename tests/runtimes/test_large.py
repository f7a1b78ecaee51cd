"""A model that no worker may hold whole is trained all the same, under a limit that the operating system enforces."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from safetensors import safe_open

from ..support.launch import HANGS_S
from ..support.ranks import large

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of data are Linux's")
SCRIPT = Path(large.__file__)


STACK_KIB = 8192
"""Of every thread, which counts as data: a thread more or less at some moment may not be what a limit is about."""


def run(*words: str) -> None:
    limited = ["sh", "-c", f'ulimit -S -s {STACK_KIB}; exec "$@"', "sh"]
    done = subprocess.run(
        [*limited, sys.executable, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=HANGS_S, check=False, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with what one process trained, and what two ranks under a limit did."""
    folder = tmp_path_factory.mktemp("large")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        large.reference(folder)
    run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), "ranks", str(folder))
    return folder


def ranks(folder: Path) -> list[dict]:
    return [json.loads((folder / f"ranks.{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def test_parameters_alone_exceed_the_memory_of_one_worker(trained):
    for found in ranks(trained):
        assert "allocate memory" in found["whole"]


@pytest.mark.parametrize("source", ["init", "checkpoint"])
def test_two_workers_train_like_one_process_without_a_limit(trained, source):
    wanted = json.loads((trained / f"{source}.json").read_text(encoding="utf-8"))
    found = [rank[source] for rank in ranks(trained)]
    for rank in found:
        assert rank["losses"] == pytest.approx(wanted, rel=1e-5)
        assert rank["peak"] <= large.LIMIT_BYTES < large.MODEL_BYTES
    assert wanted[-1] < wanted[0]
    assert sum(rank["held"] for rank in found) == large.MODEL_BYTES
    names = json.loads((trained / f"{source} trained" / "model.safetensors.index.json").read_text(encoding="utf-8"))[
        "weight_map"
    ]
    assert len(set(names.values())) == 2
    with safe_open(trained / f"{source}.safetensors", "pt") as whole:
        assert set(names) == set(whole.keys())
        for name, file in names.items():
            with safe_open(trained / f"{source} trained" / file, "pt") as part:
                assert (part.get_tensor(name) - whole.get_tensor(name)).abs().max() < 1e-6, name
