"""How far the fitted links are off for messages that the fit has not seen, over gloo ranks of this machine.

Links are measured as ``panpipe profile links`` does; then messages of other sizes go between every pair, in the same
run. Errors are of the fitted line of each pair, and of the cluster file that the planner reads.

    python benchmarks/prediction/links.py [--ranks 2] [--repeats 40] [--record FILE]
"""

import statistics
from collections.abc import Callable

import torch
from panpipe.answers.profile_links import measure_links
from panpipe.benchmarks.driver import Workers, argument_parser, report
from panpipe.core.cluster.cluster import Cluster, Device
from panpipe.core.cluster.links.lines import fit_line
from panpipe.core.cluster.links.shared import groups_to_measure, shared_links
from panpipe.runtimes.launch.launch import make_team

HELD_OUT = (1 << 10, 1 << 14, 1 << 17, 3 << 18, 1 << 21, 3 << 20)
"""Bytes between those that the fit sees."""


def measured(rank: int) -> Callable[[int], list[tuple[str, ...]]]:
    """What a rank answers, for a number of repetitions."""
    return rows_of


def rows_of(repeats: int) -> list[tuple[str, ...]]:
    """Measure together with the other ranks: the rows of the table, on rank 0."""
    team = make_team(None, None)
    cpu = torch.device("cpu")
    seen = measure_links(team, lambda _: cpu, groups_to_measure(["here"] * team.size), repeats=repeats)
    other = measure_links(team, lambda _: cpu, [], HELD_OUT, repeats).alone
    team.close()
    if team.local != (0,):
        return []
    lines = {pair: fit_line(list(times), list(times.values())) for pair, times in seen.alone.items()}
    devices = tuple(Device(f"device{number}", 1) for number in range(team.size))
    latencies = [[lines[a, b].latency_s if a != b else 0.0 for b in range(team.size)] for a in range(team.size)]
    rates = {pair: line.bytes_per_s for pair, line in lines.items()}
    tree = shared_links([device.name for device in devices], seen.together, rates, latencies)
    cluster = Cluster(devices, tree.hubs, tree.links)
    rows = []
    for size in HELD_OUT:
        of_line = [abs(lines[pair].seconds(size) / times[size] - 1) for pair, times in other.items()]
        of_file = [abs(cluster.transfer_s(*pair, size) / times[size] - 1) for pair, times in other.items()]
        took = statistics.median(times[size] for times in other.values())
        rows.append((f"{size:,}", f"{took * 1e6:.0f}", *(f"{statistics.median(e):.0%}" for e in (of_line, of_file))))
        rows[-1] += (f"{max(of_line):.0%}", f"{max(of_file):.0%}")
    return rows


def main() -> None:
    given = argument_parser(__doc__, ranks=2, repeats=40).parse_args()
    ranks = Workers(given.ranks, measured)
    rows = ranks.ask(given.repeats)[0]
    ranks.close()
    header = ("bytes, held out", "µs", "line, median", "file, median", "line, worst", "file, worst")
    report(given.record, f"Links between {given.ranks} gloo ranks", header, rows)


if __name__ == "__main__":
    main()
