"""``make fuzz``: mutated files of every format, used as a user would use them.

A case is given by format, seed and index, so every failure can be run again::

    python tests/fuzz/run.py --count 100000 --seed 0
    python tests/fuzz/run.py --case plan.json 0 17       run one case, and print what it does

Cases run in forked workers with a limit of memory. A worker that dies or hangs costs one case. Exit status 1 if any
case ends in a fault (see ``cases.Outcome``); the files are kept in ``out/fuzz``.
"""

import argparse
import json
import mmap
import os
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.fuzz.cases import MEMORY_BYTES, SECONDS, Outcome, case_of, limit_memory, run_case, run_use
from tests.fuzz.formats import formats, write_valid

ROOT = Path(__file__).resolve().parents[2]
CASES_OF_A_WORKER = 400
"""After this many cases a worker is replaced, so that caches do not count against the next case's memory."""
GRACE_S = 110.0
"""Seconds of processor time after the limit of a case at which a worker is killed: compiled code does not return for a
signal."""
WAITS_S = 1800.0
"""Seconds after which a worker is killed that takes no processor time; on a busy machine a case waits for minutes."""

Case = tuple[str, int]
"""Format and index."""


class Worker:
    """A forked process that runs cases, one after another.

    Args:
        cases: what it runs.
        seed: of all cases.
        folder: of its own, with the valid files.
    """

    def __init__(self, cases: Sequence[Case], seed: int, folder: Path) -> None:
        self.cases, self.folder = cases, folder
        self.outcomes = folder / "outcomes.jsonl"
        self.outcomes.write_bytes(b"")
        self.state = mmap.mmap(-1, 24)  # the case that runs, when it began, and the processor time until then
        self.state[:] = struct.pack("qdd", 0, time.monotonic(), 0.0)
        self.process = os.fork()
        if self.process == 0:
            self._run(seed)

    def _run(self, seed: int) -> None:
        status = 1
        try:
            limit_memory()
            with self.outcomes.open("a", encoding="utf-8") as file:
                for at, (name, index) in enumerate(self.cases):
                    self.state[:] = struct.pack("qdd", at, time.monotonic(), time.process_time())
                    outcome = run_case(name, seed, index, self.folder)
                    file.write(json.dumps([at, outcome.kind, outcome.text[-3000:]]) + "\n")
                    file.flush()
            status = 0
        finally:
            os._exit(status)

    def ended(self) -> str | None:
        """How it ended: an empty text for all cases done, else the reason; None while it runs."""
        done, status = os.waitpid(self.process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return "" if code == 0 else f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        _, since, before = struct.unpack("qdd", self.state[:])
        computed_s = _processor_s(self.process) - before
        if computed_s > SECONDS + GRACE_S or time.monotonic() - since > WAITS_S:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
            return "hang"
        return None

    def results(self, reason: str) -> list[tuple[Case, Outcome]]:
        """The outcomes so far; the case that ran when the worker ended has the reason."""
        lines = [json.loads(line) for line in self.outcomes.read_text(encoding="utf-8").splitlines()]
        found = [(self.cases[at], Outcome(kind, text)) for at, kind, text in lines]
        if reason and len(found) < len(self.cases):
            found.append((self.cases[len(found)], Outcome("killed", reason)))
        return found


def _processor_s(process: int) -> float:
    """The processor time of another process; ``clock_getcpuclockid`` computes its clock in this way on Linux."""
    return time.clock_gettime(~process << 3 | 2) if sys.platform.startswith("linux") else 0.0


def run(names: Sequence[str], count: int, seed: int, processes: int, out: Path, first: int = 0) -> Counter[str]:
    """Run ``count`` cases over formats; prints faults as they come.

    Returns:
        How many cases of each format ended in each way, by ``"format kind"``.
    """
    todo = [(name, first + index) for index in range(-(-count // len(names))) for name in names][:count]
    totals: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="panpipe-fuzz-") as folder:
        workers: dict[int, Worker] = {}
        folders = [Path(folder) / str(number) for number in range(processes)]
        for each in folders:
            each.mkdir()
            write_valid(each)
        _warm_up(folders[0])
        shown = 0
        while todo or workers:
            for number in range(processes):
                if number not in workers and todo:
                    mine, todo = todo[:CASES_OF_A_WORKER], todo[CASES_OF_A_WORKER:]
                    workers[number] = Worker(mine, seed, folders[number])
            time.sleep(0.05)
            for number, worker in list(workers.items()):
                reason = worker.ended()
                if reason is None:
                    continue
                del workers[number]
                found = worker.results(reason)
                todo = [*worker.cases[len(found) :], *todo]
                for case, outcome in found:
                    totals[f"{case[0]} {outcome.kind}"] += 1
                    if outcome.is_fault:
                        _report(case, seed, outcome, out)
            done = sum(totals.values())
            if done >= shown + 2000:
                shown = done
                print(f"{done} of {count} cases, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return totals


def _warm_up(folder: Path) -> None:
    """Run every use of every valid file, so that all code is loaded and compiled before workers are forked."""
    for name, form in formats().items():
        for use in range(len(form.uses)):
            file = folder / "mutated" / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(form.valid)
            (file.parent / "valid.safetensors").write_bytes((folder / "valid.safetensors").read_bytes())
            outcome = run_use(name, use, file, folder, seconds=300)
            if outcome.kind != "accepted":
                raise SystemExit(f"the valid {name} is {outcome.kind} by use {use}: {outcome.text}")


def _report(case: Case, seed: int, outcome: Outcome, out: Path) -> None:
    name, index = case
    data, use = case_of(name, seed, index)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / f"{seed}-{index}-{name}"
    kept.write_bytes(data)
    print(f"{outcome.kind}: {name} {seed} {index} (use {use}, {len(data)} bytes, {kept})\n{outcome.text}\n", flush=True)


def _table(totals: Counter[str], seconds: float, seed: int) -> str:
    kinds = sorted({key.split(" ", 1)[1] for key in totals})
    lines = [f"| format | cases | {' | '.join(kinds)} |", "|---|---:|" + "---:|" * len(kinds)]
    for name in formats():
        counts = [totals[f"{name} {kind}"] for kind in kinds]
        if sum(counts):
            lines.append(f"| {name} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    sums = [sum(totals[f"{name} {kind}"] for name in formats()) for kind in kinds]
    lines.append(f"| all | {sum(sums)} | {' | '.join(map(str, sums))} |")
    lines.append(f"\nSeed {seed}, {seconds:.0f} s; limits of a case: {SECONDS} s, {MEMORY_BYTES >> 20} MiB.")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="cases, over all formats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first case of each format")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--formats", nargs="+", default=list(formats()), choices=list(formats()))
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "fuzz", help="folder for the files of faults")
    parser.add_argument("--case", nargs=3, metavar=("FORMAT", "SEED", "INDEX"), help="run one case in this process")
    given = parser.parse_args()
    if given.case:
        with tempfile.TemporaryDirectory(prefix="panpipe-fuzz-") as folder:
            write_valid(Path(folder))
            outcome = run_case(given.case[0], int(given.case[1]), int(given.case[2]), Path(folder))
        print(outcome.kind, outcome.text)
        return int(outcome.is_fault)
    began = time.monotonic()
    totals = run(given.formats, given.count, given.seed, given.processes, given.out, given.first)
    print(_table(totals, time.monotonic() - began, given.seed))
    fine = ("accepted", "refused", "infeasible")
    return int(any(key.split(" ", 1)[1] not in fine for key in totals))


if __name__ == "__main__":
    sys.exit(main())
