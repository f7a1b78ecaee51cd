"""Programs trained by a contest, and by each of its plans alone; under torchrun ``contest_runs.py NAME FOLDER``."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import panpipe
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from panpipe.core.search.suggestions import preference
from panpipe.runtimes.planning import contest

from tests.laws.grouped import grouped
from tests.support.training import state_bits

STEPS = 27


class Block(nn.Module):
    """A layer with dropout and batch statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class Model(nn.Module):
    """Layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


CASES: dict[str, dict[str, Any]] = {
    "dropout, clipping, accumulation and a scheduler": {
        "updates": lambda step: step % 3 != 1,
        "options": lambda: {"clip_norm": 0.5, "scheduler": lambda made: torch.optim.lr_scheduler.StepLR(made, 4, 0.5)},
    },
    "scaler, and a checkpoint in the middle": {
        "resumes": 11,
        "options": lambda: {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**124, growth_interval=5)},
    },
    "offload": {"options": lambda: {"offload": "all", "offload_to": "disk"}},
}
RANKS: dict[str, dict[str, Any]] = {
    "replicas": {"options": lambda: {"mesh": "dp=2,pp=2"}},
    "replicas that share": {"options": lambda: {"mesh": "dp=2,pp=2", "shard": "gradients"}},
}


def _always(step: int) -> bool:
    return True


def run(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Train, and return losses, the bits of what this process holds, and the plans that ran.

    Args:
        name: of the case.
        folder: for checkpoints.
        more: further arguments of the pipeline.
    """
    case = {**CASES, **RANKS}[name]
    options: Callable[[], dict[str, Any]] = case.get("options", dict)
    updates: Callable[[int], bool] = case.get("updates", _always)
    generator = torch.Generator().manual_seed(3 + int(os.environ.get("RANK", "0")) // 2)

    def pipeline() -> panpipe.Pipeline:
        torch.manual_seed(1)
        arguments = {"optimizer": adamw, "microbatches": 4, "cache": False, "progress": False, **options(), **more}
        if "plan" in more:
            for planned in ("offload", "mesh", "shard", "cache"):
                arguments.pop(planned, None)
        return panpipe.pipeline(Model(), loss, batches[0], **grouped(**arguments))

    batches = [dict(zip("xy", torch.randn(2, 16, 32, generator=generator), strict=True)) for _ in range(STEPS)]
    pipe, losses, stages = pipeline(), list[str](), list[list[int]]()
    plans = [] if pipe.contest is None else [candidate.plan for candidate in pipe.contest.candidates]
    for step, batch in enumerate(batches):
        if step == case.get("resumes"):
            place = folder / f"{name} {len(list(folder.iterdir()))}"
            pipe.checkpoint(place)
            pipe.close()
            pipe = pipeline()
            pipe.resume(place)
        losses.append(pipe.step(batch, update=updates(step)).item().hex())
        stages.append([len(stage.nodes) for stage in pipe.plan.stages])
    evaluated = pipe.evaluate(batches[0]).item().hex()
    bits = state_bits(pipe)
    pipe.close()
    return {"losses": losses, "evaluated": evaluated, "bits": bits, "plans": plans, "stages": stages}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    # Stages move also where other work on the machine makes messages and moves slow.
    contest.MOVES, preference.HOPELESS = 1.0, math.inf
    results = [run(name, folder, contest=4)]
    plans = results[0].pop("plans")
    results += [run(name, folder, plan=plan) for plan in (*plans[:1], *plans[-1:])]
    for result in results:
        result.pop("plans", None)
    place = folder / f"{os.environ['RANK']}.json"
    place.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
