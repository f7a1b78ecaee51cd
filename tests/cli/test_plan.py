"""``panpipe plan``: its answer re-evaluated from the contract's text alone, its errors, and its files."""

import itertools
import json
import math
import re
import sys
from collections import defaultdict

import pytest
from panpipe.answers.output import seconds_text
from panpipe.cli import main
from panpipe.core.cluster.cluster import cluster_json, fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode, graph_json
from panpipe.core.plan.plan import read_plan
from panpipe.core.validation.interval import OTHER, PUBLISHED_ERRORS

RATE, LATENCY = 50.0, 0.25


def graph_document():
    """Fourteen uneven operators with two skip edges, one of them read twice."""
    times = [1.0, 2.0, 1.5, 3.0, 1.0, 1.25, 2.0, 4.0, 1.0, 1.0, 1.75, 2.0, 1.0, 6.0]
    nodes = [
        {
            "name": f"n{i}",
            "forward_s": time,
            "backward_input_s": 1.5 * time,
            "backward_weight_s": 0.5 * time,
            "optimizer_s": 0.125 * (i % 4),
            "parameter_bytes": 4 * i,
            "state_bytes": 16 * i,
            "saved_bytes": 10 + i,
            "workspace_bytes": 30 - i,
        }
        for i, time in enumerate(times)
    ]
    edges = [{"src": f"n{i}", "dst": f"n{i + 1}", "bytes": 10 + i} for i in range(len(times) - 1)]
    edges += [{"src": "n1", "dst": name, "bytes": 11} for name in ("n9", "n10")]
    edges += [{"src": "n0", "dst": "n13", "bytes": 40}]
    return {"format": "panpipe.opgraph/1", "nodes": nodes, "edges": edges}


@pytest.fixture
def graph_file(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graph_document()), encoding="utf-8")
    return path


def cluster_file(tmp_path, devices=2, memory_bytes=10_000):
    path = tmp_path / "cluster.json"
    path.write_text(cluster_json(fully_connected(devices, memory_bytes, RATE, LATENCY)), encoding="utf-8")
    return path


def run(capsys, *arguments):
    status = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def answer(capsys, *arguments):
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out)


class Reevaluation:
    """Step time and memory of an answer, from the graph file and the contract's text; shares no code with panpipe.

    Repeats sweeps over all devices until nothing more can start: slow and plain.
    """

    def __init__(self, graph, plan):
        self.nodes = {node["name"]: node for node in graph["nodes"]}
        self.stages = {stage["index"]: stage for stage in plan["stages"]}
        self.where = {name: s["index"] for s in plan["stages"] for name in s["nodes"]}
        self.orders = [[self.split(text) for text in order] for order in plan["device_actions"]]
        self.forward, self.back = self.messages(graph)
        self.end = {}
        self.device_end = self.run_devices()

    @staticmethod
    def split(text):
        kind = next(c for c in text if c.isalpha())
        stage, microbatch = text.split(kind)
        return kind, int(stage), int(microbatch)

    def messages(self, graph):
        """Bytes from stage to stage: of each tensor once for each later stage that reads it."""
        sizes = defaultdict(dict)
        for edge in graph["edges"]:
            pair = self.where[edge["src"]], self.where[edge["dst"]]
            assert pair[0] <= pair[1]
            if pair[0] < pair[1]:
                sizes[pair][edge["src"]] = edge["bytes"]
        forward, back = defaultdict(list), defaultdict(list)
        for (source, target), tensors in sizes.items():
            far = self.stages[source]["device"] != self.stages[target]["device"]
            delay = LATENCY + sum(tensors.values()) / RATE if far else 0.0
            forward[target].append((source, delay))
            back[source].append((target, delay))
        return forward, back

    def cost(self, stage, key):
        return sum(self.nodes[name][key] for name in self.stages[stage]["nodes"])

    def time(self, kind, stage):
        keys = {"F": ["forward_s"], "I": ["backward_input_s"], "W": ["backward_weight_s"]}
        return sum(self.cost(stage, key) for key in keys.get(kind, ["backward_input_s", "backward_weight_s"]))

    def reads(self, kind, stage, microbatch):
        """What an action waits for: the ends of other actions, each with the delay of its message."""
        if kind == "F":
            return [(("F", source, microbatch), delay) for source, delay in self.forward[stage]]
        if kind == "W":
            return [(("back", stage, microbatch), 0.0)]
        gradients = [(("back", source, microbatch), delay) for source, delay in self.back[stage]]
        return [(("F", stage, microbatch), 0.0), *gradients]

    def run_devices(self):
        clocks, positions = [0.0] * len(self.orders), [0] * len(self.orders)
        moved = True
        while moved:
            moved = False
            for device, order in enumerate(self.orders):
                while positions[device] < len(order):
                    kind, stage, microbatch = order[positions[device]]
                    reads = self.reads(kind, stage, microbatch)
                    if any(read not in self.end for read, _ in reads):
                        break
                    start = max([clocks[device], *(self.end[read] + delay for read, delay in reads)])
                    clocks[device] = start + self.time(kind, stage)
                    if kind != "W":
                        self.end["F" if kind == "F" else "back", stage, microbatch] = clocks[device]
                    positions[device] += 1
                    moved = True
        assert positions == [len(order) for order in self.orders], "deadlock"
        return clocks

    def held_stages(self, device):
        return [s["index"] for s in self.stages.values() if s["device"] == device]

    @property
    def step_s(self):
        return max(
            end + sum(self.cost(stage, "optimizer_s") for stage in self.held_stages(device))
            for device, end in enumerate(self.device_end)
        )

    @property
    def peaks(self):
        result = []
        for device, order in enumerate(self.orders):
            held, peak = 0, 0
            for kind, stage, _ in order:
                held += self.cost(stage, "saved_bytes") if kind == "F" else 0
                workspace = max(self.nodes[name]["workspace_bytes"] for name in self.stages[stage]["nodes"])
                peak = max(peak, held + workspace)
                held -= self.cost(stage, "saved_bytes") if kind in "BW" else 0
            result.append(peak + sum(self.cost(stage, "state_bytes") for stage in self.held_stages(device)))
        return result

    @property
    def compute_s(self):
        return sum(self.time(kind, stage) for order in self.orders for kind, stage, _ in order)


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 3), (2, 4), (3, 5)])
def test_plan_json_re_evaluates_to_its_own_numbers(tmp_path, capsys, graph_file, devices, microbatches):
    cluster = cluster_file(tmp_path, devices)
    flags = ("--graph", graph_file, "--cluster", cluster, "--microbatches", microbatches, "--budget", 300)
    plan = answer(capsys, *flags)
    again = Reevaluation(graph_document(), plan)
    assert plan["predicted_step_s"] == pytest.approx(again.step_s, rel=1e-12)
    assert plan["peak_memory_bytes"] == again.peaks
    assert plan["efficiency"] == pytest.approx(again.compute_s / (devices * again.step_s), rel=1e-12)
    assert plan["evaluations"] <= 300
    assert [stage["index"] for stage in plan["stages"]] == list(range(len(plan["stages"])))
    names = [node["name"] for node in graph_document()["nodes"]]
    assert [name for stage in plan["stages"] for name in stage["nodes"]] == names
    done = [action for order in again.orders for action in order]
    for stage, m in itertools.product((s["index"] for s in plan["stages"]), range(microbatches)):
        assert sorted(kind for kind, *where in done if where == [stage, m]) in (["B", "F"], ["F", "I", "W"])
    assert {(stage, m) for _, stage, m in done} == set(
        itertools.product((s["index"] for s in plan["stages"]), range(microbatches))
    )


def test_plan_reports_a_step_lengthened_by_contention(tmp_path, capsys, graph_file):
    names = [f"device{i}" for i in range(4)]
    hubs = [(name, "left" if number < 2 else "right", 1e6) for number, name in enumerate(names)]
    document = {
        "format": "panpipe.cluster/1",
        "devices": [{"name": name, "memory_bytes": 10_000, "type": None} for name in names],
        "hubs": ["left", "right"],
        "links": [{"a": a, "b": b, "bytes_per_s": r, "latency_s": 0} for a, b, r in (*hubs, ("left", "right", 2.0))],
    }
    cluster = tmp_path / "narrow.json"
    cluster.write_text(json.dumps(document), encoding="utf-8")
    flags = ("--graph", graph_file, "--cluster", cluster, "--microbatches", 4, "--budget", 300, "--mesh", "pp=2,dp=2")
    plan = answer(capsys, *flags)
    told = plan["idle"]["step_s"] > 1.001 * plan["predicted_step_s"]
    out = run(capsys, *flags)[1]
    assert told == ("In the simulator, where transfers share links, the step takes" in out)
    assert told


def test_memory_is_a_hard_limit(tmp_path, capsys, graph_file):
    cluster = cluster_file(tmp_path, memory_bytes=1400)
    plan = answer(capsys, "--graph", graph_file, "--cluster", cluster, "--microbatches", 4, "--budget", 300)
    assert max(Reevaluation(graph_document(), plan).peaks) <= 1400
    flags = ("--graph", graph_file, "--cluster", cluster, "--microbatches", 4, "--budget", 300)
    plan = answer(capsys, *flags, "--memory-limit", 1300)
    assert max(Reevaluation(graph_document(), plan).peaks) <= 1300


def test_infeasible_exits_3_with_the_binding_constraint(tmp_path, capsys, graph_file):
    cluster = cluster_file(tmp_path, memory_bytes=850)
    status, out, err = run(capsys, "--graph", graph_file, "--cluster", cluster, "--microbatches", 4, "--budget", 120)
    assert (status, out) == (3, "")
    summary, *block = err[err.index("panpipe: ") :].splitlines()  # after a line of progress, if it took long
    assert re.fullmatch(
        r"panpipe: nothing found fits: device \d \('device\d'\) needs \d+ B at \d+[FBIW]\d+ and may hold 850 B; "
        r"smallest change that fits: .*",
        summary,
    )
    assert block[0].startswith("  comes closest: ")
    assert all(kind in block[1] for kind in ("parameters", "gradients", "optimizer", "saved", "workspace"))
    assert [re.split("  +", line)[1] for line in block[3:]] == [
        "smaller microbatches",
        "more memory",
        "more devices",
    ]


def test_infeasible_suggests_shard_and_the_suggestion_fits(tmp_path, capsys):
    nodes = tuple(OpNode(f"n{i}", 0.01, 0.01, 0.01, 0.0, 1000, 4000, 10) for i in range(4))
    graph = tmp_path / "sharded.json"
    graph.write_text(graph_json(OpGraph(nodes, tuple(OpEdge(f"n{i}", f"n{i + 1}", 10) for i in range(3)))))
    cluster = cluster_file(tmp_path, 4, 7000)  # two operators have 8000 bytes of state; 6000 with half the optimizer
    words = ("--graph", graph, "--cluster", cluster, "--microbatches", 8, "--budget", 60, "--schedule", "1f1b")
    status, out, err = run(capsys, *words, "--mesh", "pp=2,dp=2", "--json")
    assert status == 3
    (change,) = (each for each in json.loads(out)["changes"] if each["change"] == "shard")
    assert (change["replicas"], "--shard optimizer: 2 replicas" in err) == (2, True)
    plan = answer(capsys, *words, "--mesh", "pp=2,dp=2", "--shard", "optimizer")
    assert plan["predicted_step_s"] <= change["step_s"] * (1 + 1e-9)
    assert max(plan["peak_memory_bytes"]) <= 7000
    assert "shard" not in run(capsys, *words, "--memory-limit", 3000, "--mesh", "pp=4")[2]


def test_alternatives_need_less_memory_and_are_written(tmp_path, capsys, graph_file):
    flags = ("--graph", graph_file, "--cluster", cluster_file(tmp_path), "--microbatches", 4, "--budget", 1200)
    out = tmp_path / "plan.json"
    plan = answer(capsys, *flags, "--top", 3, "--out", out)
    assert plan["runners_up"]
    plans = [plan, *plan["runners_up"]]
    for faster, slower in itertools.pairwise(plans):
        assert slower["predicted_step_s"] > faster["predicted_step_s"]
        assert max(slower["peak_memory_bytes"]) < max(faster["peak_memory_bytes"])
    for found in plans:
        again = Reevaluation(graph_document(), found)
        assert found["predicted_step_s"] == pytest.approx(again.step_s, rel=1e-12)
        assert found["peak_memory_bytes"] == again.peaks
    written = [read_plan(out), *(read_plan(tmp_path / f"plan.{number}.json") for number in range(2, len(plans) + 1))]
    assert [each.prediction.step_s for each in written] == [each["predicted_step_s"] for each in plans]
    status, shown, _ = run(capsys, *flags, "--top", 3)
    assert status == 0
    table = shown[shown.index("The fastest plan, and slower ones with less memory") :]
    assert all(seconds_text(each["predicted_step_s"]) in table for each in plans)
    assert answer(capsys, *flags)["runners_up"] == []


@pytest.mark.slow
def test_each_suggested_change_makes_the_request_feasible(tmp_path, capsys, graph_file):
    def planned(devices, microbatches, limit, graph=graph_file):
        cluster = cluster_file(tmp_path, devices, 850)
        flags = ("--graph", graph, "--cluster", cluster, "--microbatches", microbatches, "--budget", 120)
        status, out, _ = run(capsys, *flags, *limit, "--json")
        return status, json.loads(out)

    status, nothing = planned(2, 4, ())
    assert status == 3
    assert not nothing["feasible"]
    assert sum(nothing["holds_bytes"].values()) == nothing["needs_bytes"] == 850 + max(nothing["excess_bytes"])
    changes = {change["change"]: change for change in nothing["changes"]}

    count = changes["more devices"]["devices"]
    assert planned(count, 4, ())[0] == 0
    assert planned(count - 1, 4, ())[0] == 3

    parts = changes["smaller microbatches"]["microbatches"] // 4
    document = graph_document()
    for node in document["nodes"]:
        for key in ("forward_s", "backward_input_s", "backward_weight_s"):
            node[key] /= parts
        for key in ("saved_bytes", "workspace_bytes"):
            node[key] = math.ceil(node[key] / parts)
    for edge in document["edges"]:
        edge["bytes"] = math.ceil(edge["bytes"] / parts)
    smaller = tmp_path / "smaller.json"
    smaller.write_text(json.dumps(document), encoding="utf-8")
    assert planned(2, 4 * parts, (), smaller)[0] == 0

    more = changes["more memory"]["bytes"]
    cluster = cluster_file(tmp_path, 2, 850 + int(more))
    flags = ("--graph", graph_file, "--cluster", cluster, "--microbatches", 4, "--budget", 120)
    assert run(capsys, *flags)[0] == 0
    assert "offload" not in changes  # its devices reach no host


def test_plan_table_has_stages_devices_and_figures(tmp_path, capsys, graph_file):
    flags = ("--graph", graph_file, "--cluster", cluster_file(tmp_path), "--microbatches", 4, "--budget", 50)
    status, out, _ = run(capsys, *flags)
    assert status == 0
    plan = answer(capsys, *flags)
    assert f"{len(plan['stages'])} stages on 2 devices, 4 microbatches, {plan['schedule']}" in out
    assert f"efficiency {plan['efficiency']:.1%}" in out
    assert "device1" in out


BAD = {
    "no such cluster": (["--cluster", "nowhere"], "there is no cluster 'nowhere': the nearest of"),
    "no workers": (["--cluster", "cpu:0"], "'cpu:0' has 0 workers"),
    "no graph": (["--graph", "none.json"], "cannot read 'none.json'"),
    "no microbatches": (["--microbatches", "0"], "--microbatches is 0: give a whole number"),
    "no budget": (["--budget", "0"], "--budget is 0: give a whole number"),
    "more stages than operators": (["--cluster", "cpu:15"], "15 devices for 14 operators"),
    "a limit of nothing": (["--memory-limit", "0"], "memory limit is 0 bytes"),
    "graph and model": (["--model", "a:b"], "give one of --graph FILE and --model"),
    "a model's option for a graph": (["--dtype", "bf16"], "--dtype is for a model"),
    "no plan to show": (["--top", "0"], "--top is '0'"),
    "a folder to write": (["--out", "."], "cannot write '.': it is a folder"),
    "a folder as a graph": (["--graph", "."], "cannot read '.': Is a directory"),
    "a folder as a cluster": (["--cluster", "."], "there is no cluster '.'"),
    "an option that is none": (["--microbatch", "4"], "No such option: --microbatch"),
    "no number": (["--microbatches", "four"], "--microbatches is 'four': give a whole number"),
    "nowhere to write": (["--out", "no/such/plan.json"], "cannot write 'no/such/plan.json'"),
}


@pytest.mark.parametrize(
    ("limit", "message"),
    [("20", "is 20 bytes, in which no model fits: give the unit"), ("100kB", "no cluster"), ("7 B", "no cluster")],
)
def test_a_limit_for_a_model_needs_a_unit_and_may_be_small(capsys, limit, message):
    assert main(["plan", "--model", "gpt2", "--cluster", "nowhere", "--memory-limit", limit]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_a_wrong_request_is_one_line_and_status_2(tmp_path, capsys, graph_file, changed, message):
    flags = {"--graph": graph_file, "--cluster": cluster_file(tmp_path), "--microbatches": 4, "--budget": 20}
    flags |= {changed[0]: changed[1]}
    status, out, err = run(capsys, *(part for pair in flags.items() for part in pair))
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


# Models.

MODULE = """
import torch
from torch import nn


def step(model, batch):
    return model(batch).pow(2).mean()


def make():
    layers = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)]
    return nn.Sequential(*layers), step, torch.randn(8, 8)


def wrong():
    return 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "made_for_test_plan.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield "made_for_test_plan"
    sys.modules.pop("made_for_test_plan", None)


@pytest.mark.parametrize(
    ("factory", "changed", "message"),
    [
        ("make", ("--schedule", "nope"), "there is no schedule 'nope'"),
        ("make", ("--schedule", "1f1b", "--chunks", "2"), "--chunks is 2, and 1f1b has 1 stages a device"),
        ("make", ("--budget", 0), "--budget is 0"),
        ("make", ("--layers", "--offload", "all"), "--layers does not plan offload"),
        ("make", ("--microbatches", 9), "the batch has 8 samples for 9 microbatches"),
        ("step", (), "step' needs model and batch: name a function without required arguments"),
        ("wrong", (), "wrong' returned an object of type int"),
        ("none", (), "has no function 'none'"),
    ],
)
def test_a_wrong_request_is_refused_before_a_model_is_captured(capsys, module, factory, changed, message):
    flags = ("--model", f"{module}:{factory}", "--cluster", "2xH100", "--microbatches", 4, *changed)
    status, out, err = run(capsys, *flags)
    assert (status, out) == (2, "")
    assert message in err.splitlines()[-1]  # lines of progress may precede it


def test_plan_of_a_user_model(tmp_path, capsys, module):
    out = tmp_path / "plan.json"
    flags = ("--cluster", "cpu:2", "--microbatches", 4, "--budget", 30)
    plan = answer(capsys, "--model", f"{module}:make", *flags, "--out", out)
    assert plan["predicted_step_s"] > 0
    written = read_plan(out)
    parameters = [name for stage in written.stages for name in stage.parameters]
    assert sorted(parameters) == sorted(
        f"{i}.{j}.{kind}" for i in range(3) for j in (0, 2) for kind in ("weight", "bias")
    )


@pytest.mark.parametrize("microbatches", [4, 3])  # of equal sizes, and of 3, 3 and 2 samples
def test_plan_of_a_model_for_devices_that_are_not_here(capsys, module, microbatches):
    flags = ("--cluster", "2xA100-40GB", "--microbatches", microbatches, "--budget", 30)
    plan = answer(capsys, "--model", f"{module}:make", *flags)
    assert 0 < plan["predicted_step_s"] < 0.1
    error = PUBLISHED_ERRORS[OTHER]
    assert plan["predicted_interval_s"] == pytest.approx(
        [plan["predicted_step_s"] / (1 + error), plan["predicted_step_s"] / (1 - error)]
    )
    assert plan["throughput"]["samples_per_s"] == pytest.approx(8 / plan["predicted_step_s"])
    # Products of F, I and W, 3 × 2 layers of 8 × 16; the first of all has no input to differentiate.
    flops = 8 * 2 * 8 * 16 * (3 * 6 - 1)
    assert plan["throughput"]["model_flops_utilisation"] == pytest.approx(
        flops / plan["predicted_step_s"] / 2 / 19.5e12
    )
    assert answer(capsys, "--model", f"{module}:make", *flags) == plan  # nothing was timed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp-overlap", "all"), "--tp-overlap is for tensor ranks, and there is only one: give --tp N"),
        (("--cp-order", "contiguous"), "--cp-order is for context ranks, and there is only one: give --cp N"),
        (("--dtype", "int8"), "there is no number type 'int8': use one of fp32"),
        (("--optimizer", "lion"), "there is no optimizer 'lion': use one of adam-master"),
        (("--batch", 4), "--batch and --sequence are for bundled models"),
        (("--cluster", "8xNOTHING"), "NOTHING"),
    ],
)
def test_a_request_without_costs_is_status_2(capsys, module, flags, message):
    given = ("--cluster", "2xA100-40GB", "--microbatches", 4, "--model", f"{module}:make", *flags)
    status, out, err = run(capsys, *given)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{module}", "write module:factory"),
        ("{module}:nothing", "has no function 'nothing'"),
        ("no_such_module_anywhere:make", "cannot import 'no_such_module_anywhere'"),
        ("{module}:wrong", "returned an object of type int: return (model, step, example_batch)"),
    ],
)
def test_a_wrong_model_is_status_2(capsys, module, name, message):
    flags = ("--cluster", "cpu:2", "--microbatches", 4)
    status, out, err = run(capsys, "--model", name.format(module=module), *flags)
    assert (status, out) == (2, "")
    assert message in err
