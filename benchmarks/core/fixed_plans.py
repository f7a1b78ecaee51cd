"""A fixed set of plans, which can be compared with those of another commit byte by byte.

    python benchmarks/core/fixed_plans.py --against COMMIT [--only WORD] [--record FILE]
    python benchmarks/core/fixed_plans.py FOLDER [--only WORD]    one file a plan, and their SHA-256 on standard output

All named schedules for uniform stages, and plans of two operator graphs (a file with times, and a captured GPT-2) over
schedules, meshes, recomputation, offload, sharing, clusters and the search. Nothing is measured: a difference is one of
the code. Sums may round differently on another processor, so plans are compared on one machine. Both trees write a
group of plans in turns.

A plan has the same bytes, or is the same plan, or differs. The same plan has the same stages, edges, orders, memory
policy, and predicted time and memory; only the number of evaluations and the description of the cluster differ. A
difference ends with status 1.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path

NODES = 24
"""Operators of the graph in the file."""
BUDGET = "100000"
"""Evaluations of each search: it ends by their number, not by a time. With a few thousand, the results of named
schedules depend on how a search divides its budget; with this number they do not."""
GROUPS = ("schedule-", "unequal-", "file-", "gpt2-", "memory-", "policies-")
"""Beginnings of plans' names: the plans that a tree writes before it is the other tree's turn."""
SCHEDULES = (
    "gpipe", "1f1b", "interleaved-1f1b", "looped", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "v-min", "v-half",
    "1f1b-v", "gis", "gis-h", "dualpipe-v",
)  # fmt: skip


def graph() -> dict:
    """An operator graph with uneven costs and two skip edges."""
    source = random.Random(0)
    nodes = [
        {
            "name": f"layer.{i}", "forward_s": round(source.uniform(0.5, 2), 3) * 1e-3,
            "backward_input_s": round(source.uniform(0.5, 2), 3) * 1e-3,
            "backward_weight_s": round(source.uniform(0.5, 2), 3) * 1e-3, "optimizer_s": 1e-4,
            "parameter_bytes": 1 << 20, "state_bytes": 4 << 20, "saved_bytes": source.randrange(1, 8) << 20,
            "workspace_bytes": 1 << 18,
        }
        for i in range(NODES)
    ]  # fmt: skip
    edges = [{"src": f"layer.{i}", "dst": f"layer.{i + 1}", "bytes": 1 << 20} for i in range(NODES - 1)]
    edges += [
        {"src": "layer.2", "dst": "layer.19", "bytes": 1 << 19},
        {"src": "layer.5", "dst": "layer.9", "bytes": 4096},
    ]
    return {"format": "panpipe.opgraph/1", "nodes": nodes, "edges": edges}


def uniform_requests() -> dict[str, list[str]]:
    """Schedules of uniform and of unequal stages."""
    times = ["--forward", "1", "--backward-input", "1.1", "--backward-weight", "0.9", "--json"]
    sizes = ["--devices", "4", "--microbatches", "8", "--comm", "0.05"]
    found = {f"schedule-{name}": ["schedule", name, *sizes, *times] for name in SCHEDULES}
    for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "dualpipe-v", "gis"):
        scale = "1,1.5" if name in ("gpipe", "1f1b", "zb-h1") else "1,1.5,0.8,1.2"
        unequal = ["--devices", "2", "--microbatches", "6", "--freed-by-input", "0.3", "--stage-scale", scale]
        found[f"unequal-{name}"] = ["schedule", name, *unequal, *times]
    for limit in ("3", "6"):
        found[f"schedule-auto-{limit}"] = ["schedule", "auto", *sizes, "--memory-limit", limit, *times]
    return found


def plan_requests(file: Path) -> dict[str, list[str]]:
    """Plans of a graph file, and of a captured model."""
    of_file = ["plan", "--graph", str(file), "--cluster", "4xA100-40GB", "--microbatches", "8", "--budget", BUDGET]
    found = {}
    for schedule, mesh, recompute in itertools.product(
        ("1f1b", "zb-h1", "auto"), ("pp=4", "pp=2,dp=2"), ("none", "all", "auto")
    ):
        name = f"file-{schedule}-{mesh}-{recompute}".replace("=", "").replace(",", "-")
        found[name] = [*of_file, "--schedule", schedule, "--mesh", mesh, "--recompute", recompute]
    for schedule in ("interleaved-1f1b", "v-half", "zb-v", "dualpipe-v", "gpipe", "gis"):
        found[f"file-{schedule}"] = [*of_file, "--schedule", schedule]
    model = ["plan", "--model", "gpt2", "--microbatches", "8", "--budget", BUDGET]
    for schedule, cluster, mesh in (
        ("1f1b", "4xA100-40GB", "pp=4"),
        ("1f1b", "2x2xA100-40GB", "pp=2,dp=2"),
        ("zb-h1", "2x2xA100-40GB", "pp=4"),
        ("interleaved-1f1b", "2xA100-40GB", "pp=2"),
        ("auto", "4xA100-40GB", "pp=4"),
        ("auto", "2x2xA100-40GB", "pp=2,dp=2"),
    ):
        name = f"gpt2-{schedule}-{cluster}-{mesh}".replace("=", "").replace(",", "-")
        found[name] = [*model, "--cluster", cluster, "--schedule", schedule, "--mesh", mesh]
    return found


def memory_requests(file: Path) -> dict[str, list[str]]:
    """Schedules and plans that offload, and plans whose replicas share state."""
    found = {}
    for name, copy in itertools.product(("po-f", "po-h"), ("0.5", "2")):
        sizes = ["--devices", "4", "--microbatches", "12", "--comm", "0.05", "--host-copy", copy]
        found[f"memory-{name}-{copy}"] = ["schedule", name, *sizes, "--json"]
    of_file = ["plan", "--graph", str(file), "--cluster", "4xA100-40GB", "--microbatches", "8", "--budget", BUDGET]
    for schedule, offload, limit in (("1f1b", "all", "1GB"), ("po-f", "none", "1GB"), ("auto", "auto", "250MB")):
        name = f"memory-{schedule}-offload-{offload}"
        found[name] = [*of_file, "--schedule", schedule, "--offload", offload, "--memory-limit", limit]
    for shard in ("optimizer", "gradients", "parameters", "auto"):
        words = ["--mesh", "pp=2,dp=2", "--shard", shard, "--schedule", "1f1b", "--memory-limit", "250MB"]
        found[f"memory-shard-{shard}"] = [*of_file, *words]
    return found


def policy_requests(file: Path) -> dict[str, list[str]]:
    """Plans with each combination of recomputation, offload and sharding, on devices with and without shared links."""
    of_file = ["plan", "--graph", str(file), "--microbatches", "8", "--mesh", "pp=2,dp=2", "--budget", "3000"]
    found = {}
    for schedule, cluster, recompute, offload, shard in itertools.product(
        ("1f1b", "zb-h1", "v-half"), ("4xA100-40GB", "4xA10"), ("none", "all"), ("none", "all"), ("none", "parameters")
    ):
        name = f"policies-{schedule}-{cluster}-{recompute}-{offload}-{shard}"
        words = ["--schedule", schedule, "--recompute", recompute, "--offload", offload, "--shard", shard]
        found[name] = [*of_file, "--cluster", cluster, *words]
    for schedule in SCHEDULES:
        found[f"policies-{schedule}-4xA10"] = [*of_file, "--cluster", "4xA10", "--schedule", schedule]
    return found


def requests(file: Path) -> dict[str, list[str]]:
    """Name of a plan → the command line, without the file to write."""
    return {**uniform_requests(), **plan_requests(file), **memory_requests(file), **policy_requests(file)}


def write(folder: Path, only: str, group: str) -> None:
    """Write the plans by the ``panpipe`` that is imported, and print their hashes."""
    from panpipe.cli import main as command

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "graph.json"
    file.write_text(json.dumps(graph()), encoding="utf-8")
    for name, words in requests(file).items():
        if only not in name or not name.startswith(group):
            continue
        out, printed, errors = folder / f"{name}.json", io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            status = command([*words, *(["--out", str(out)] if words[0] == "plan" else [])])
        if words[0] == "schedule" or status:
            out.write_text(printed.getvalue() or errors.getvalue(), encoding="utf-8")
        print(f"{hashlib.sha256(out.read_bytes()).hexdigest()[:16]}  {name}", flush=True)


def summary(text: str) -> str:
    """The figures of a plan or a schedule."""
    try:
        plan = json.loads(text)
    except ValueError:
        return text.strip()[:80]
    if "makespan" in plan:
        return f"{plan['makespan']:.6g}, peak {max(plan['peak_memory']):g}"
    prediction = plan["prediction"]
    peak = max(prediction["peak_memory_bytes"]) / 1e9
    evaluations = prediction.get("evaluations")
    return f"{plan['schedule']} {prediction['step_s'] * 1e3:.6g} ms, peak {peak:.4g} GB, {evaluations} evaluations"


def same_plan(before: str, now: str) -> bool:
    """Whether two files have the same plan, up to the number of evaluations and the description of the cluster."""
    plans = []
    for text in (before, now):
        try:
            plan = json.loads(text)
        except ValueError:
            return False
        if "prediction" not in plan:
            return False
        plan["prediction"] = {**plan["prediction"], "evaluations": None, "cluster": None}
        plans.append(plan)
    return bool(plans[0] == plans[1])


def compare(commit: str, only: str) -> tuple[list[tuple[str, ...]], dict[str, int]]:
    """A row for each plan that differs, and how many there are of each kind."""
    from panpipe.benchmarks.driver import trees

    with trees(commit) as pair, tempfile.TemporaryDirectory() as name:
        folders = [Path(name, "there"), Path(name, "here")]
        names = [one for one in requests(Path("graph.json")) if only in one]
        for group in GROUPS:
            if any(one.startswith(group) for one in names):
                for tree, folder in zip(pair, folders, strict=True):
                    print(tree.run(__file__, str(folder), "--only", only, "--group", group), flush=True)
        rows, counts = [], dict.fromkeys(("the same bytes", "the same plan", "another plan"), 0)
        for each in names:
            before, now = ((folder / f"{each}.json").read_text(encoding="utf-8") for folder in folders)
            kind = "the same bytes" if before == now else "the same plan" if same_plan(before, now) else "another plan"
            counts[kind] += 1
            if kind == "another plan":
                rows.append((each, summary(before), summary(now)))
    return rows, counts


def main() -> int:
    """Write the plans, or compare them with another commit's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="where the plans go")
    parser.add_argument("--against", help="a commit to compare with")
    parser.add_argument("--only", default="", help="plans with this word in their names")
    parser.add_argument("--group", default="", help="plans whose names begin so")
    parser.add_argument("--record", help="append the result to this Markdown file")
    given = parser.parse_args()
    if (given.folder is None) == (given.against is None):
        parser.error("give one of FOLDER and --against COMMIT")
    if given.folder is not None:
        write(given.folder, given.only, given.group)
        return 0
    from panpipe.benchmarks.driver import report

    rows, counts = compare(given.against, given.only)
    found = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    title = f"{sum(counts.values())} plans against {given.against}: {found}"
    report(given.record, title, ("plan", "there", "here"), rows)
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main())
