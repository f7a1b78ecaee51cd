"""Checks laws of lengths on each rank: ``torchrun … ranks.py FOLDER NAME...``.

The problems of each rank go to ``FOLDER/RANK.json``.
"""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.laws.lengths.models import CASES
from tests.laws.lengths.walks import (
    ACCUMULATE,
    CHECKPOINT,
    EVALUATE,
    RESUME,
    STEP,
    check_peaks,
    check_walk,
    random_walk,
)

RANK = int(os.environ.get("RANK", "0"))
REPLICAS = {"mesh": "pp=1,dp=2", "ahead": RANK}
"""Two replicas, whose batches have other lengths."""
FIXED = (
    (STEP, 9), (EVALUATE, 12), (ACCUMULATE, 17), (STEP, 20), (EVALUATE, 12), (CHECKPOINT, 9), (STEP, 30), (RESUME, 9),
    (STEP, 17),
)  # fmt: skip


def _walk(name: str, walk: Any, folder: Path, **options: Any) -> None:
    check_walk(CASES[name], walk, folder, **options)


def _random(name: str, seed: int, **options: Any) -> Callable[[Path], None]:
    return partial(_walk, name, random_walk(CASES[name], seed), **options)


LAWS: dict[str, Callable[[Path], None]] = {
    "accumulation, evaluation and checkpoints": partial(_walk, "lstm", FIXED),
    "peaks": lambda folder: check_peaks(CASES["unet"], {"x": {2: 32, 3: 34}, "y": {1: 32, 2: 34}}),
    "split schedule and recomputation": _random("gpt with dropout", 1, schedule="zb-h1", recompute="all"),
    "offload": _random("bert with dropout", 2, offload="all"),
    "any sequence, recurrent": _random("lstm", 3),
    "any sequence, images": _random("unet", 4, schedule="zb-h1"),
    "any sequence, translation": _random("t5", 5),
    **{
        f"shared {what}": _random("llama", 6, **REPLICAS, shard=what)
        for what in ("optimizer", "gradients", "parameters")
    },
}


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error")
    for text in (
        ".*relates samples",
        "microbatches of a new shape",
        ".*is captured again for each new value",
        "batches keep changing shape",
    ):
        warnings.filterwarnings("ignore", text)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    folder, *names = sys.argv[1:]
    found = {}
    for name in names:
        try:
            LAWS[name](Path(folder, name))
            found[name] = ""
        except Exception as error:
            found[name] = f"{error!r} {traceback.format_exc()[-1500:]}"
        Path(folder, f"{RANK}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
