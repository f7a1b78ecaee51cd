"""Write a fixed set of plans into a folder, so that two commits can be compared byte by byte.

    python benchmarks/core/fixed_plans.py FOLDER    one file a plan, and their SHA-256 on standard output
    diff -r BEFORE AFTER                            nothing, where planning stayed the same

All named schedules for uniform stages, and plans of two operator graphs (a file with times, and a captured GPT-2) over
schedules, meshes, recomputation, clusters and the search. Nothing is measured on the machine: a difference is one of
the code. Sums may round differently on another processor, so hashes are compared on one machine.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import random
from pathlib import Path

import panpipe
from panpipe.cli import main as command

NODES = 24
"""Operators of the graph in the file."""


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


def requests(folder: Path) -> dict[str, list[str]]:
    """File name → command line."""
    file = folder / "graph.json"
    file.write_text(json.dumps(graph()), encoding="utf-8")
    found = {
        f"schedule-{name}": ["schedule", name, "--devices", "4", "--microbatches", "8", "--forward", "1",
                             "--backward-input", "1.1", "--backward-weight", "0.9", "--comm", "0.05", "--json"]
        for name in panpipe.families()
        if name != "building-block"
    }  # fmt: skip
    found["schedule-auto"] = ["schedule", "auto", "--devices", "4", "--microbatches", "8", "--forward", "1",
                              "--backward-input", "1.1", "--backward-weight", "0.9", "--comm", "0.05",
                              "--memory-limit", "3", "--json"]  # fmt: skip
    for schedule, mesh, recompute in itertools.product(
        ("1f1b", "zb-h1", "auto"), ("pp=4", "pp=2,dp=2"), ("none", "all", "auto")
    ):
        name = f"file-{schedule}-{mesh}-{recompute}".replace("=", "").replace(",", "-")
        found[name] = ["plan", "--graph", str(file), "--cluster", "4xA100-40GB", "--microbatches", "8",
                       "--schedule", schedule, "--mesh", mesh, "--recompute", recompute]  # fmt: skip
    for schedule in ("interleaved-1f1b", "v-half", "zb-v", "dualpipe-v", "gpipe", "gis"):
        found[f"file-{schedule}"] = ["plan", "--graph", str(file), "--cluster", "4xA100-40GB", "--microbatches", "8",
                                     "--schedule", schedule]  # fmt: skip
    for schedule, cluster in itertools.product(("1f1b", "auto"), ("4xA100-40GB", "2x2xA100-40GB")):
        found[f"captured-{schedule}-{cluster}"] = ["plan", "--model", "gpt2", "--cluster", cluster, "--microbatches",
                                                   "8", "--schedule", schedule]  # fmt: skip
    return found


def main() -> None:
    """All of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the plans go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in requests(folder).items():
        out = folder / f"{name}.json"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            status = command([*words, *(["--out", str(out)] if words[0] == "plan" else [])])
        if words[0] == "schedule":
            out.write_text(printed.getvalue(), encoding="utf-8")
        text = out.read_bytes() if out.exists() else b""
        print(f"{hashlib.sha256(text).hexdigest()[:16]}  {name}  {status or 0}", flush=True)


if __name__ == "__main__":
    main()
