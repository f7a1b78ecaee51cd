"""A process that trains and writes a checkpoint after every step: ``… checkpointing.py FOLDER STEPS [ASYNC | ALL]``.

With ASYNC they are written in the background, and with ALL none is removed. ``serve`` forks such processes.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import panpipe

from tests.support.programs.optimizing import pipe_of, train
from tests.support.ranks.forks import serve

CASE = "batchnorm with a skip"


def main() -> None:
    """Train from the last checkpoint, and print the loss of every step."""
    folder, steps, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    pipe = pipe_of(CASE)
    last = panpipe.latest_checkpoint(folder)
    if last is not None:
        pipe.resume(last)
    print("begins", pipe.metrics.steps, flush=True)
    folder.joinpath("pid.new").write_text(str(os.getpid()), encoding="utf-8")
    folder.joinpath("pid.new").rename(folder / "pid")  # whoever reads it finds all of it
    while pipe.metrics.steps < steps:
        print(pipe.metrics.steps, *(loss.hex() for loss in train(pipe, CASE, 1)), flush=True)
        pipe.checkpoint(
            folder / f"step-{pipe.metrics.steps}", wait=how != ["ASYNC"], keep=None if how == ["ALL"] else 2
        )
    pipe.close()


if __name__ == "__main__":
    work = serve(main, lambda *_: None) if sys.argv[1:] == ["serve"] else main
    if work is not None:
        work()
