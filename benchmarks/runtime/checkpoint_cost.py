"""What checkpoints cost training: blocks of steps with a save at their beginning, in turns with blocks without.

    python benchmarks/runtime/checkpoint_cost.py [--pairs PAIRS] [--steps STEPS] [--kinds background waiting]
                                                 [--folder FOLDER] [--record FILE]

Two threads train the benchmark's GPT. ``wait=False`` and ``wait=True`` are compared with no save in the same run. The
cost of a step is the time of a block with a save divided by that of the block before it, which has none. If all cores
are busy with training, a save costs its processor time: that of a save alone, divided by that of a block without.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import panpipe
import torch
from torch import nn

from benchmarks.gpt import GPT, LENGTH, MICROBATCHES, VOCABULARY
from benchmarks.recording import machine, record

ROWS = 8
KINDS = {"background": False, "waiting": True}
"""Kinds of saves, with their ``wait=``."""


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The training step."""
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def block(pipe: panpipe.Pipeline, batch: dict[str, torch.Tensor], steps: int, folder: Path | None, wait: bool) -> tuple:
    """Seconds of a block, of its save's call, of each step, of what is left of the save; its processor time."""
    processor_s = time.process_time()
    start, each = time.perf_counter(), []
    if folder is not None:
        pipe.checkpoint(folder / f"step-{pipe.steps}", wait=wait, keep=2)
    call_s = time.perf_counter() - start
    for _ in range(steps):
        began = time.perf_counter()
        pipe.step(batch)
        each.append(time.perf_counter() - began)
    whole_s = time.perf_counter() - start
    pipe.wait_for_checkpoint()  # what a block leaves is not the next one's cost; it is zero if training hid the save
    return whole_s, call_s, each, time.perf_counter() - start - whole_s, time.process_time() - processor_s


def spread(values: list[float], unit: float, digits: int) -> str:
    """The median, and the range."""
    found = [value * unit for value in values]
    return f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def main() -> None:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6, help="blocks with a save, of each kind")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of saves")
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints go; a temporary folder by default")
    parser.add_argument("--record", default=None, help="append the table to this file")
    arguments = parser.parse_args()
    kinds = [KINDS[name] for name in arguments.kinds]
    began = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1))
    batch = {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    pipe = panpipe.pipeline(
        GPT(), step, batch, optimizer=torch.optim.AdamW, microbatches=MICROBATCHES, schedule="1f1b", max_chunks=1,
        progress=False, plan_cache=False,
    )  # fmt: skip
    print(f"built after {time.perf_counter() - began:.0f} s", flush=True)
    try:
        for wait in kinds:  # the first save allocates the copy
            block(pipe, batch, 2, folder, wait)
        rows = []
        for wait in kinds:
            ratios, steps, calls, rests, shares = [], [], [], [], []
            for _ in range(arguments.pairs):
                alone_s, _, without, _, trains_s = block(pipe, batch, arguments.steps, None, wait)
                with_s, call_s, each, rest_s, _ = block(pipe, batch, arguments.steps, folder, wait)
                *_, saves_s = block(pipe, batch, 0, folder / f"alone-{len(ratios)}", wait)
                shares.append(saves_s / trains_s)
                ratios.append(with_s / alone_s - 1)
                steps.append(statistics.median(each) / statistics.median(without) - 1)
                calls.append(call_s)
                rests.append(rest_s)
            rows.append(
                (
                    f"`wait={wait}`",
                    spread(calls, 1e3, 0),
                    spread(ratios, 100, 1),
                    spread(steps, 100, 1),
                    spread(rests, 1e3, 0),
                    spread(shares, 100, 2),
                )
            )
        size = sum(file.stat().st_size for file in panpipe.latest_checkpoint(folder).iterdir())
    finally:
        pipe.close()
        shutil.rmtree(folder)
    title = f"A checkpoint of {size / 1e6:.0f} MB every {arguments.steps} steps of {statistics.median(without):.2f} s"
    header = (
        "save", "its call, ms", "a block takes longer, %", "a median step takes longer, %", "left at its end, ms",
        "its processor time, % of a block's",
    )  # fmt: skip
    print(title, header, *rows, sep="\n")
    if arguments.record:
        record(arguments.record, title, machine(torch.device("cpu")), header, rows)


if __name__ == "__main__":
    main()
