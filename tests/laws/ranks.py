"""Runs scripts on each rank: ``torchrun … ranks.py FOLDER NAME...``. Problems go to ``FOLDER/RANK.json``."""

import json
import os
import sys
from pathlib import Path

import panpipe
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.laws.scripts import alone, problems, run, scripts


def main() -> None:
    torch.set_num_threads(1)
    os.environ["PANPIPE_CACHE"] = ""
    folder, *names = sys.argv[1:]
    results, every = {}, scripts()
    for name in names:
        try:
            results[name] = problems(every[name], run(every[name], panpipe.pipeline), alone(every[name]))
        except (
            Exception
        ) as error:  # the other rank may wait: it ends after PANPIPE_TIMEOUT_S, and the next script begins
            results[name] = [f"{type(error).__name__}: {error}"]
        Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
