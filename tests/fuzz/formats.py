"""The formats that panpipe reads: a valid file of each, and what a user does with it."""

import json
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from attrs import evolve, field, frozen
from panpipe.cli import main
from panpipe.core.cluster.catalog import find_cluster
from panpipe.core.cluster.cluster import Cluster, Device, Hub, cluster_json
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode, graph_json
from panpipe.core.costs.reductions import TensorReductions
from panpipe.core.errors import PanpipeError, RequestError
from panpipe.core.plan.plan import Plan, plan_json
from panpipe.core.trace.perfetto import trace_json
from panpipe.explore import uniform_answers
from panpipe.explore.question import UniformQuestion, parse_question, parse_request, plain_question
from panpipe.explore.results import open_results
from panpipe.runtimes.planning.plan_cache import FORMAT as CACHED
from panpipe.runtimes.planning.plan_cache import read_plans
from panpipe.runtimes.weights.checkpoint import Checkpoint
from panpipe.simulators.run import simulate

from ..support.plans import hosted, leaves, orders, plan_of
from .checkpoints import TENSORS, checked, resumed, signed, valid_files
from .mutations import dumped, mutated_bytes, mutated_tree

Use = Callable[[Path, Path], int]
"""(mutated file, folder with the valid files) → exit status. It raises PanpipeError, or prints an error as the CLI."""


@frozen
class Format:
    """One format.

    Args:
        name: of the file.
        valid: its bytes.
        uses: what is done with it.
        tree: bytes → plain data; None for a format without.
        bytes: plain data → bytes.
    """

    name: str
    valid: bytes
    uses: Sequence[Use]
    tree: Callable[[bytes], Any] | None = json.loads
    bytes: Callable[[Any], bytes] = field(default=dumped)

    def mutated(self, random: Random) -> bytes:
        """A mutation of the valid file."""
        if self.tree is None or random.random() < 0.4:
            data = mutated_bytes(self.valid, random)
            return mutated_bytes(data, random) if random.random() < 0.1 else data
        return self.bytes(mutated_tree(self.tree(self.valid), random))


def cli(*words: str) -> Use:
    """A command line; ``FILE`` is the mutated file, and ``@name`` a valid one."""

    def use(file: Path, folder: Path) -> int:
        given = [word.replace("FILE", str(file)).replace("@", f"{folder}/") for word in words]
        return main(given)

    return use


def _plan() -> Plan:
    rows = orders("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1I0 1F1 1W0 1I1 1W1 1F2 1I2 1W2")
    cluster = hosted(_cluster(4), 1e9, 1e-6)
    offload = (leaves(0, 50, "1: 0B0 0F2"),)
    plan = plan_of(rows, (0, 1), cluster=cluster, data=2, offload=offload, recompute=(1,))
    found = simulate(plan)
    assert plan.prediction is not None
    return evolve(plan, prediction=evolve(plan.prediction, step_s=found.step_s))


def _tensor_plan() -> Plan:
    """Two stages over two tensor ranks each, with their all-reduces."""
    sums = TensorReductions(2, 2, 200, 200, 2.0, 2.0, ranks=2)
    costs = StageCosts(3.0, 2.0, 1.0, saved_bytes=100, reductions=sums)
    rows = orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    return evolve(plan_of(rows, (0, 1), costs=[costs] * 2, cluster=_cluster(4)), mesh=Mesh(2, 1, tensor=2))


def _cluster(devices: int) -> Cluster:
    names = [f"gpu{number}" for number in range(devices)]
    links = tuple(Link(name, "switch", 1e9, 1e-6, both_bytes_per_s=1.5e9) for name in names)
    return Cluster(tuple(Device(name, 10**9) for name in names), (Hub("switch"),), links)


def _typed_cluster() -> Cluster:
    return find_cluster("1x2xA100-40GB")


def _graph() -> OpGraph:
    nodes = tuple(
        OpNode(f"n{i}", 0.01 * (i + 1), 0.01, 0.02, 0.001, 1000, 4000, 500, 100, (f"w{i // 2}",)) for i in range(6)
    )
    edges = (*(OpEdge(f"n{i}", f"n{i + 1}", 1000) for i in range(5)), OpEdge("n0", "n4", 10, False, 1))
    return OpGraph(nodes, edges, name="net")


CATALOGUE = """format = "panpipe.catalog/1"

[sources]
lab = "measured in our lab"

[devices.mine]
like = "A100-40GB"
host_link = "cable"
host_copy = "cable"
title = "Ours"
aliases = ["our-gpu"]
memory_bytes = { value = 30e9, source = "lab" }
launch_overhead_s = { value = 5e-6, assumed = "a guess" }
[devices.mine.efficiency]
matmul = { value = 0.5, source = "lab" }

[links.cable]
title = "A cable"
peak_bytes_per_s = { value = 10e9, source = "lab" }
effective_bytes_per_s = { value = 9e9, source = "lab" }
effective_back_bytes_per_s = { value = 8e9, source = "lab" }
effective_both_bytes_per_s = { value = 15e9, source = "lab" }
latency_s = { value = 1e-6, source = "lab" }

[nodes.box]
title = "Our box"
device = "mine"
interconnect = "none"
gpus = { value = 2, source = "lab" }
gpus_per_pcie_switch = { value = 1, source = "lab" }
sockets = { value = 1, source = "lab" }
socket_link = "cable"
nics = { value = 1, source = "lab" }
nic = "cable"
rails = false
oversubscription = { value = 1.0, source = "lab" }
spine_latency_s = { value = 1e-6, source = "lab" }
host_memory_bytes = { value = 100_000_000_000, source = "lab" }

[clusters.ours]
title = "Two boxes"
groups = [{ node = "box", nodes = 2, gpus = 2, parameters = { nics = 1 } }]
"""
BLOCK = {
    "format": "panpipe.block/1", "placement": [0, 1, 1, 0], "period": 12, "forward": [0, 1, 2, 3],
    "input": [9, 8, 7, 5], "weight": [],
}  # fmt: skip
QUESTION = {
    "kind": "uniform", "schedule": "looped", "devices": 2, "microbatches": 4, "chunks": 2, "forward": 1.5,
    "backward_input": 1.0, "backward_weight": 1.0, "comm": 0.1, "freed_by_input": 0.5, "memory_limit": 9.0,
    "host_copy": 0.0, "parameters": {"microbatches_per_loop": 2},
}  # fmt: skip
WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int64)}


def toml_bytes(tree: Any) -> bytes:
    """Plain data as TOML; what TOML cannot express (null, keys of the root that are no tables) as text."""
    lines = [f"{_quoted(key)} = {_inline(value)}" for key, value in tree.items()] if isinstance(tree, dict) else ["x"]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _quoted(text: str) -> str:
    return json.dumps(text)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(key)} = {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return dumped(value).decode("utf-8", "surrogatepass") if value is not None else '"null"'


def _safetensors_tree(data: bytes) -> Any:
    length = int.from_bytes(data[:8], "little")
    return [json.loads(data[8 : 8 + length]), len(data) - 8 - length]


def _safetensors_bytes(tree: Any, size: int = 72 - 24 + 8) -> bytes:
    header = dumped(tree[0] if isinstance(tree, list) and tree else tree)
    return len(header).to_bytes(8, "little") + header + bytes(size)


def _weights(file: Path, folder: Path) -> int:
    return _load(file)


def _load(path: Path) -> int:
    checkpoint = Checkpoint(path)
    wanted = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    missing = [name for name in wanted if checkpoint.find([name]) is None]
    if missing:
        raise checkpoint.lacking(missing, len(wanted))
    for name, tensor in wanted.items():
        checkpoint.check(name, "parameter", tensor)
    checkpoint.read_into(wanted)
    return 0


def _cached(file: Path, folder: Path) -> int:
    try:
        read_plans(file, KEY)
    except PanpipeError as error:  # a run reports it so, and plans anew
        raise RequestError(f"the cached plan '{file}' cannot be used, planning anew: {error}") from None
    return 0


def explored(what: str) -> Use:
    """The use of a file that ``panpipe explore FILE`` opens, and exports as another one."""

    def use(file: Path, folder: Path) -> int:
        found = open_results([file])
        for number in range(len(found.shown)):
            json.dumps(found.answer(number), allow_nan=False)
            found.file(number, what)
        return 0

    return use


def _asked(file: Path, folder: Path) -> int:
    """A question of the explorer's page: the answer, except for those that search, and its command line."""
    data = parse_request(file.read_bytes())
    question = parse_question(data.get("question"))
    plain_question(question)
    if isinstance(question, UniformQuestion) and question.schedule != "auto":
        scored, misfit = uniform_answers.scored_of(question)
        json.dumps(uniform_answers.answer(question, scored, misfit), allow_nan=False)
    return int(question.command is None)


KEY = {"graph": "a", "mesh": "b"}


@cache
def formats() -> dict[str, Format]:
    """Every format by its name."""
    from safetensors.torch import save

    plan = _plan()
    traced = trace_json(simulate(plan).trace)
    cached = json.loads(plan_json(plan))
    del cached["format"]
    document = {"format": CACHED, "plans": [cached], "fastest": [{"seconds": 0.5, "size": 8}], "key": KEY}
    few = ("--microbatches", "4", "--budget", "40", "--schedule", "1f1b", "--json")
    index = {"metadata": {"total_size": 56}, "weight_map": dict.fromkeys(WEIGHTS, "valid.safetensors")}
    found = (
        Format("plan.json", plan_json(plan).encode(), (
            cli("validate", "FILE"), cli("validate", "FILE", "--json"), cli("simulate", "FILE", "--json"),
            cli("simulate", "FILE", "--trace", "@out.json", "--report", "@out.html"), cli("simulate", "FILE"),
            cli("simulate", "FILE", "--forward-only", "--json"), cli("simulate", "FILE", "--eager", "--json"),
            cli("compare", "@trace.json", "@trace.json", "--plan", "FILE", "--report", "@out.html"),
            cli("simulate", "FILE", "--cluster", "@small-cluster.json", "--json"), explored("report"),
        )),
        Format("tensor-plan.json", plan_json(_tensor_plan()).encode(), (
            cli("validate", "FILE", "--json"), cli("simulate", "FILE", "--json"), explored("trace"),
            cli("simulate", "FILE", "--cluster", "@small-cluster.json", "--report", "@out.html"),
        )),
        Format("schedule.csv", b"0F0,0F1,,0B0,,0B1\r\n,1F0,1F1,1I0,1W0,1B1\r\n", (
            cli("validate", "FILE"), cli("validate", "FILE", "--json"), cli("simulate", "FILE", "--json"),
            cli("simulate", "FILE", "--comm", "0.1", "--report", "@out.html"),
        ), lambda data: [row.split(",") for row in data.decode().split("\r\n")], _csv_bytes),
        Format("lowered.csv", b"0F0,0SEND_F0,0RECV_B0,0B0\r\n1RECV_F0,1F0,1B0,1SEND_B0\r\n", (
            cli("validate", "FILE"), cli("simulate", "FILE", "--json"),
        ), lambda data: [row.split(",") for row in data.decode().split("\r\n")], _csv_bytes),
        Format("graph.json", graph_json(_graph()).encode(), (
            cli("plan", "--graph", "FILE", "--cluster", "@cluster.json", *few),
            cli("plan", "--graph", "FILE", "--cluster", "@cluster.json", "--microbatches", "4", "--budget", "40",
                "--schedule", "zb-h1", "--recompute", "auto", "--out", "@out.json"),
            cli("plan", "--graph", "FILE", "--cluster", "@cluster.json", "--mesh", "auto", *few),
        )),
        Format("cluster.json", cluster_json(_typed_cluster()).encode(), (
            cli("plan", "--graph", "@graph.json", "--cluster", "FILE", *few),
            cli("catalog", "show", "FILE", "--json"), cli("catalog", "show", "FILE", "--svg", "@out.svg"),
            cli("plan", "--graph", "@graph.json", "--cluster", "FILE", "--offload", "all", *few),
        )),
        Format("small-cluster.json", cluster_json(hosted(_cluster(4), 1e9)).encode(), (
            cli("simulate", "@plan.json", "--cluster", "FILE", "--json"), cli("catalog", "show", "FILE"),
            cli("simulate", "@plan.json", "--cluster", "FILE", "--trace", "@out.json", "--report", "@out.html"),
            cli("plan", "--graph", "@graph.json", "--cluster", "FILE", "--mesh", "pp=2,dp=2", *few),
        )),
        Format("catalogue.toml", CATALOGUE.encode(), (
            cli("catalog", "--file", "FILE", "--json"), cli("catalog", "show", "ours", "--file", "FILE"),
            cli("catalog", "--file", "FILE"), cli("catalog", "show", "mine", "--file", "FILE"),
            cli("plan", "--graph", "@graph.json", "--cluster", "FILE", *few),
        ), lambda data: tomllib.loads(data.decode()), toml_bytes),
        Format("block.json", json.dumps(BLOCK).encode(), (
            cli("schedule", "building-block", "--devices", "2", "--chunks", "2", "--microbatches", "4", "--block",
                "FILE", "--json"),
            cli("schedule", "building-block", "--devices", "2", "--chunks", "2", "--microbatches", "3", "--comm", "1",
                "--block", "FILE", "--csv", "@out.csv", "--svg", "@out.svg"),
        )),
        Format("trace.json", traced.encode(), (
            cli("compare", "FILE", "@trace.json", "--json"), cli("compare", "@trace.json", "FILE"),
            cli("compare", "FILE", "@trace.json", "--report", "@out.html", "--svg", "@out.svg"),
            cli("compare", "FILE", "@trace.json", "--plan", "@plan.json", "--report", "@out.html"), explored("svg"),
        )),
        Format("weights.safetensors", save(WEIGHTS), (_weights,), _safetensors_tree, _safetensors_bytes),
        Format("model.safetensors.index.json", json.dumps(index).encode(), (_weights,)),
        Format("cached-plan.json", json.dumps(document).encode(), (_cached,)),
        Format("question.json", json.dumps({"question": QUESTION}).encode(), (_asked,)),
        Format("manifest.json", valid_files()["manifest.json"], (resumed("manifest.json"), checked), bytes=signed),
        Format("tensors.safetensors", valid_files()[TENSORS], (resumed(TENSORS),), _safetensors_tree,
               lambda tree: _safetensors_bytes(tree, len(valid_files()[TENSORS]))),
    )  # fmt: skip
    return {each.name: each for each in found}


def _csv_bytes(tree: Any) -> bytes:
    rows = tree if isinstance(tree, list) else [tree]
    lines = [",".join(map(_cell, row)) if isinstance(row, list) else _cell(row) for row in rows]
    return "\r\n".join(lines).encode("utf-8", "surrogatepass")


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value).decode("utf-8", "surrogatepass")


def write_valid(folder: Path) -> None:
    """Write the valid files that uses read in addition to the mutated one."""
    for each in formats().values():
        (folder / each.name).write_bytes(each.valid)
    (folder / "valid.safetensors").write_bytes(formats()["weights.safetensors"].valid)
