"""Counts processes that end wrongly: two ranks train a small model and end in each of several ways, many times.

A rank that leaves threads or process groups to the interpreter's end can abort there, after all of its work, and some
of the time only. So exits are counted, on a quiet machine and under load::

    python benchmarks/failures/exits.py [EXITS] [--load PROCESSES]

Ranks are forked from a process that has imported everything, which takes most of their time, and end as any script
does: by returning to the interpreter, which then ends.
"""

import importlib
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import panpipe
import torch
from torch import nn

from benchmarks.driver import IMPORTED, argument_parser, busy, fork_ranks, run, statuses

RANKS = 2


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The training step."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def model() -> nn.Module:
    """The model, equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def train(ending: str, file: Path, rank: int) -> None:
    """What a rank does, without closing anything, until it ends in that way."""
    batch = {"x": torch.ones(4, 8), "y": torch.zeros(4, 4)}

    def trained() -> panpipe.Pipeline:
        plan = file if file.exists() else "auto"
        pipe = panpipe.pipeline(model(), step, batch, optimizer=torch.optim.SGD, microbatches=2, plan=plan)
        pipe.step(batch)
        pipe.evaluate(batch)
        return pipe

    if ending == "compiled":
        step(torch.compile(model(), backend="panpipe"), batch).backward()
        return
    if ending == "group":
        torch.distributed.init_process_group("gloo")
    LEFT_OPEN.append(pipe := trained())
    if ending == "plan" and rank == 0:
        file.write_text(panpipe.plan_json(pipe.plan), encoding="utf-8")
    if ending == "several":
        LEFT_OPEN.extend([trained(), trained()])
    if ending == "with":
        with trained() as other:
            other.step(batch)
    if ending == "exit":
        sys.exit(0)
    if ending == "raise":
        raise ValueError("an error of the user's own")


LEFT_OPEN: list[panpipe.Pipeline] = []
ENDINGS = {"end": 0, "exit": 0, "several": 0, "group": 0, "with": 0, "raise": 1, "compiled": 0}
"""Each way to end, and the exit status that a process ends with then; ``compiled`` has one process."""


def main() -> None:
    """Count exits, and print what they were."""
    parser = argument_parser(__doc__)
    parser.add_argument("exits", type=int, nargs="?", default=200)
    parser.add_argument("--load", type=int, default=0, help="processes that keep the processors busy meanwhile")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in IMPORTED:
        importlib.import_module(name)
    ended, wrong, endings, started = Counter[str](), list[str](), ["plan"], time.monotonic()
    folder = Path(tempfile.mkdtemp())
    with busy(given.load):
        while ended.total() < given.exits or endings:
            endings = endings or list(ENDINGS)
            ending = endings.pop(0)
            ranks = 1 if ending == "compiled" else RANKS
            children = fork_ranks(ranks, partial(train, ending, folder / "plan.json"), folder)
            for rank, status in enumerate(statuses(children)):
                error = (folder / f"{rank}.err").read_text(encoding="utf-8")
                ended[ending] += 1
                if status != ENDINGS.get(ending, 0) or "terminate called" in error:
                    wrong.append(f"{ending}: status {status}: {error.strip()[-300:]!r}")
    shutil.rmtree(folder)
    print(f"{len(wrong)} of {ended.total()} exits failed, with {given.load} busy processes: {dict(ended)}")
    print(f"{time.monotonic() - started:.0f} s", *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    run(main)
