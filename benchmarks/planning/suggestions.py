"""Checks that the changes suggested for an infeasible request fit when they are requested.

A dozen requests for GPT-2 large that fit on no device. Each runs in a separate process, and so does each suggested
change, as a user would request it: more devices, smaller microbatches (the graph's costs divided), more memory,
``--recompute auto``, ``--offload auto``; a sharded state is not requested. Some requests, some changes, or all of them:

    python benchmarks/planning/suggestions.py --graph gpt2_large.opgraph.json [--cases 1,4] [--change recompute]
                                              [--jobs 2] [--record FILE]

Requests run ``--jobs`` at a time, by default as many as there are processors. A row has the CPU time of the request and
of the change: some fifty seconds for a request and its four changes. The exit status is 1 if a change does not fit.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attrs import frozen
from panpipe.core.costs.graph import graph_json, read_graph
from panpipe.core.search.suggestions.changes import MORE_DEVICES, MORE_MEMORY, OFFLOAD, RECOMPUTE, SMALLER_MICROBATCHES
from panpipe.core.search.suggestions.relaxations import with_smaller_microbatches

from benchmarks.driver import argument_parser, report
from benchmarks.plan_command import on_devices, plan_command

REQUESTS = (
    (2, 16, 10e9), (8, 8, 3e9), (3, 8, 6.8e9), (4, 8, 6.8e9), (2, 4, 12e9), (8, 16, 3.2e9),
    (4, 16, 5e9), (6, 12, 4.2e9), (2, 8, 13e9), (16, 16, 1.6e9), (5, 8, 4.8e9), (8, 8, 2.5e9),
)  # fmt: skip
"""Devices, microbatches, bytes of each device."""
CHANGES = (SMALLER_MICROBATCHES, RECOMPUTE, OFFLOAD, MORE_MEMORY, MORE_DEVICES)
"""What can be asked for."""
FITS, INFEASIBLE = 0, 3
"""Exit status of ``panpipe plan``."""


@frozen
class Request:
    """What is asked for.

    Args:
        graph: the file.
        devices, microbatches: how many.
        memory: bytes of each device.
        more: further arguments.
        title: for people.
    """

    graph: Path
    devices: int
    microbatches: int
    memory: float
    more: tuple[str, ...] = ()
    title: str = ""

    def ask(self) -> tuple[int, dict[str, Any], float]:
        """Exit status, answer, and seconds of the processor."""
        with tempfile.TemporaryDirectory() as name:
            arguments = on_devices(Path(name), self.graph, self.devices, self.microbatches, self.memory)
            answers, messages = Path(name, "answers"), Path(name, "messages")
            with answers.open("w", encoding="utf-8") as out, messages.open("w", encoding="utf-8") as errors:
                process = subprocess.Popen(plan_command(*arguments, *self.more), stdout=out, stderr=errors)
                _, ended, used = os.wait4(process.pid, 0)
            process.returncode = status = os.waitstatus_to_exitcode(ended)
            if status not in (FITS, INFEASIBLE):
                print(messages.read_text(encoding="utf-8"), file=sys.stderr)
            answer = json.loads(answers.read_text(encoding="utf-8")) if status in (FITS, INFEASIBLE) else {}
        return status, answer, used.ru_utime + used.ru_stime

    def instead(self, change: Mapping[str, Any], folder: Path) -> "Request":
        """The same with a change of its answer; ``folder`` is for a graph file of its own."""
        devices, microbatches, memory, graph, more = self.devices, self.microbatches, self.memory, self.graph, self.more
        what = change["change"]
        if what == MORE_DEVICES:
            devices = change["devices"]
            title = f"{devices} devices"
        elif what == MORE_MEMORY:
            memory += change["bytes"]
            title = f"{change['bytes'] / 1e9:.2f} GB more"
        elif what == SMALLER_MICROBATCHES:
            microbatches = change["microbatches"]
            parts = microbatches // self.microbatches
            graph = folder / f"{parts}.json"
            graph.write_text(graph_json(with_smaller_microbatches(read_graph(self.graph), parts)), encoding="utf-8")
            title = f"1/{parts} microbatches"
        else:
            assert what in (RECOMPUTE, OFFLOAD)
            more, title = (*more, f"--{what}", "auto"), what
        return Request(graph, devices, microbatches, memory, more, title)


def rows_of(request: Request, wanted: tuple[str, ...]) -> Iterator[tuple[list[str], bool]]:
    """A row for each change that the answer to a request names, and whether it is as it should be."""
    status, answer, seconds = request.ask()
    if status != INFEASIBLE:
        fits = status == FITS
        yield [request.title, f"{seconds:.0f}", "", "", "fits as it is" if fits else f"exit {status}"], fits
        return
    with tempfile.TemporaryDirectory() as name:
        for change in answer["changes"]:
            if change["change"] in wanted:
                other = request.instead(change, Path(name))
                found, _, took = other.ask()
                cells = [request.title, f"{seconds:.0f}", other.title, f"{took:.0f}"]
                yield [*cells, "fits" if found == FITS else f"exit {found}"], found == FITS


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--graph", type=Path, required=True, help="operator-graph file of GPT-2 large")
    every = ",".join(str(number) for number in range(1, len(REQUESTS) + 1))
    parser.add_argument("--cases", default=every, help=f"numbers of requests, with commas between; by default {every}")
    parser.add_argument("--change", action="append", choices=CHANGES, help="ask for this alone; may be given again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="requests at a time")
    arguments = parser.parse_args()
    if not set(arguments.cases.split(",")) <= set(every.split(",")):
        parser.error(f"--cases is {arguments.cases}: give some of {every}")
    wanted, rows, kept, start = tuple(arguments.change or CHANGES), [], True, time.perf_counter()
    requests = []
    for number in map(int, arguments.cases.split(",")):
        devices, microbatches, memory = REQUESTS[number - 1]
        title = f"{number}: {devices} × {microbatches}, {memory / 1e9:g} GB"
        requests.append(Request(arguments.graph.resolve(), devices, microbatches, memory, title=title))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for found in pool.map(lambda request: list(rows_of(request, wanted)), requests):
            for cells, right in found:
                print(" · ".join(cells), file=sys.stderr, flush=True)
                rows.append(cells)
                kept &= right
    header = ("devices × microbatches", "core s", "asked for instead", "core s", "answer")
    title = f"Suggestions: {time.perf_counter() - start:.0f} s, {arguments.jobs} at a time"
    report(arguments.record, title, header, rows)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
