"""The least idle time that any order in a V allows, by CP-SAT (OR-Tools), against the order that the search finds.

For a case of ``bench_search`` at its least memory, with two stages on each device; equal microbatches run in their
order. CP-SAT (`order_program`) begins with the search's order: it finds a faster one, proves that there is none, or
leaves a bound.

    python benchmarks/planning/least_idle.py [--devices 4] [--microbatches 8] [--forward 10] [--seconds 600]
        [--workers 8]
"""

import argparse
import json
import sys
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from panpipe.core.actions import Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.evaluate.coding import FORWARD, INPUT, WEIGHT
from panpipe.core.schedules.placement import folded_placement
from panpipe.core.schedules.scored import Scored
from panpipe.core.search.orders.auto import EVALUATIONS

from benchmarks.planning.bench_search import CASES, search
from benchmarks.planning.order_program import OrderProgram
from benchmarks.planning.placed import Placed
from benchmarks.planning.small_cases import RATE, Case

CHUNKS = 2
CODES = {Kind.F: FORWARD, Kind.I: INPUT, Kind.B: INPUT, Kind.W: WEIGHT}


def in_a_v(public: dict[str, Any], memory: float) -> tuple[Placed, int]:
    """A public case with a stage as an operator, in a V, and the number of its units of time in one of the case.

    A message, of one byte or none, takes the whole delay of a hop in the units: hops without a delay are not supported,
    since gradients have at least one byte here.
    """
    twentieths = [round(20 * public[name] / CHUNKS) for name in ("forward", "backward_input", "backward_weight")]
    common = gcd(*twentieths, hop := round(20 * public["comm"]))
    node = dict(
        zip(("forward_s", "backward_input_s", "backward_weight_s"), (t / common for t in twentieths), strict=True)
    )
    nodes = [OpNode(f"stage{i}", **node, saved_bytes=1) for i in range(CHUNKS * public["devices"])]
    graph = OpGraph(tuple(nodes), tuple(OpEdge(a.name, b.name, 1) for a, b in pairwise(nodes)))
    latency_s, limit = hop // common - 1, int(memory * CHUNKS + 1e-3)
    cluster = fully_connected(public["devices"], limit, RATE, float(latency_s))
    case = Case("public", graph, cluster, public["microbatches"], latency_s, limit)
    return Placed(case, folded_placement(public["devices"], CHUNKS)), 20 // common


def starts_of(found: Scored, public: dict[str, Any], unit: int) -> dict[tuple[int, int, int], int]:
    """The starts of the search's order, in units; a B is an I and a W."""
    starts = {}
    late = public["backward_input"] / CHUNKS
    for actions, times in zip(found.schedule.device_actions, found.result.starts, strict=True):
        for action, time in zip(actions, times, strict=True):
            starts[action.stage, CODES[action.kind], action.microbatch] = round(time * unit)
            if action.kind is Kind.B:
                starts[action.stage, WEIGHT, action.microbatch] = round((time + late) * unit)
    return starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward", type=float, default=10, help="the case with this time of F")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--workers", type=int, default=8)
    given = parser.parse_args()
    wanted = given.devices, given.microbatches, given.forward
    cases = json.loads(CASES.read_text(encoding="utf-8"))["frontiers"]
    known = {(c["devices"], c["microbatches"], c["forward"]): c for c in cases if c["comm"]}
    if wanted not in known:
        parser.error(f"{wanted} is no case with hops: devices, microbatches and F are one of {sorted(known)}")
    public = known[wanted]
    best = public["frontier"][0]
    found = search(public, best["memory"], EVALUATIONS, 0)
    work = public["microbatches"] * sum(public[name] for name in ("forward", "backward_input", "backward_weight"))

    def cut(step: float) -> str:
        return f"{step:g} (idle time {(step - work) / (best['makespan'] - work) - 1:+.1%})"

    print(f"public best {best['makespan']:g} · search {cut(found.result.makespan)}", flush=True)
    placed, unit = in_a_v(public, best["memory"])
    starts = starts_of(found, public, unit) if found.schedule.placement == placed.device_of else {}
    program = OrderProgram(placed, round(found.result.makespan * unit))
    step, bound = program.shortest(given.seconds, given.workers, starts)
    print(f"CP-SAT {cut(step / unit)} · at least {cut(bound / unit)}")


if __name__ == "__main__":
    main()
