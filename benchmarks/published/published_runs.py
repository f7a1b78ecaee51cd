"""Published training runs against the prediction: step times, and what each is made of.

Every run is one of a paper or a repository, with the configuration that it states; `assumed` lists what it does not
state. Kernels have the cost model's times on the catalogue's device, collectives the catalogue's links, and the
simulator runs the schedule over the stages. No constant belongs to a run.

    python benchmarks/published/published_runs.py [--record FILE]
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attrs import evolve, field, frozen
from overlap import overlapped_s
from panpipe.core.analytic.optimizers import find_optimizer
from panpipe.core.analytic.roofline import kernels_s
from panpipe.core.cluster.catalog import find_cluster, find_device
from panpipe.core.cluster.cluster import Cluster, fully_connected
from panpipe.core.cluster.collectives import Operation, collective_s
from panpipe.core.cluster.device_type import DeviceType
from panpipe.core.costs.costs import stage_costs, stage_edges
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.problem.assemble import assemble
from panpipe.simulators.run import simulate
from published_layers import HALF, Model, Part, Sharding, by_kind, embedding, head, layer

from benchmarks.recording import machine, record

TERMS = ("matmul", "attention", "bandwidth-bound", "launch", "tp", "p2p", "bubble", "dp", "optimizer", "slow-down")
NIC = {"100g": (12e9, 22e-6), "200g": (23.5e9, 22e-6), "400g": (48.5e9, 22e-6)}
"""Bytes/s and latency in seconds between nodes, for each GPU's NIC: the catalogue's numbers."""


@frozen(slots=False)
class Run:
    """A published run.

    Args:
        name: what it is called here.
        source: of its figures.
        model: its layers.
        device: of the catalogue.
        gpus: in all.
        samples: of a microbatch.
        batch: samples of a step.
        tensor, pipeline: sizes of these dimensions; the rest is data parallel.
        chunks: stages a device.
        recompute: none, selective (attention alone) or full.
        by_tokens, fused_sums, sum_bytes: see `Sharding`.
        blocking: whether a device waits for its pipeline messages; otherwise they overlap computation.
        spread: whether the GPUs of a tensor-parallel group each send their part of a pipeline message.
        sharded: what data parallelism shards: nothing, the optimizer (ZeRO-1), or the parameters as well (FSDP).
        overlapped: whether data parallelism overlaps the last backward.
        nic: the network's part for each GPU.
        step_s: published; if it is None, follows from ``flops_per_s``.
        flops_per_s: published, of one GPU, by the formula that ``counted`` names.
        counted: ``model`` for 6 FLOPs for each parameter and token with whole attention, ``hardware`` for 8.
        assumed: what the source does not state.
    """

    name: str
    source: str
    model: Model
    device: str
    gpus: int
    samples: int
    batch: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    recompute: str = "none"
    by_tokens: bool = False
    fused_sums: bool = True
    sum_bytes: int = 4
    blocking: bool = True
    spread: bool = True
    sharded: str = "nothing"
    overlapped: bool = False
    nic: str = "200g"
    step_s: float | None = None
    flops_per_s: float = 0.0
    counted: str = "model"
    assumed: str = ""

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def microbatches(self) -> int:
        return self.batch // (self.data * self.samples)

    @property
    def measured_s(self) -> float:
        """The published step time."""
        if self.step_s is not None:
            return self.step_s
        done = self.model.flops_per_token * (4 / 3 if self.counted == "hardware" else 1)
        return self.batch * self.model.sequence * done / (self.gpus * self.flops_per_s)

    @cached_property
    def how(self) -> Sharding:
        return Sharding(self.samples, self.tensor, self.by_tokens, self.fused_sums, self.sum_bytes)

    @property
    def parameters(self) -> float:
        """Of one GPU, where nothing is sharded over replicas: those of the fullest stage."""
        own = self.model.layers / self.pipeline * self.model.layer_parameters
        return (own + self.model.vocabulary * self.model.hidden) / self.tensor


@frozen
class Pass:
    """Seconds of a pass by term."""

    terms: dict[str, float] = field(factory=dict, hash=False)

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    def __add__(self, other: "Pass") -> "Pass":
        names = {*self.terms, *other.terms}
        return Pass({name: self.terms.get(name, 0.0) + other.terms.get(name, 0.0) for name in names})

    def times(self, count: float) -> "Pass":
        return Pass({name: count * value for name, value in self.terms.items()})


@cache
def tensor_s(device: str, tensor: int, operation: str, size: float) -> float:
    """Seconds of a collective of a tensor-parallel group, within a node."""
    return collective_s(find_cluster(f"8x{device}"), range(tensor), size, Operation(operation))


@cache
def data_s(nic: str, count: int, operation: str, size: float) -> float:
    """Seconds of a collective over replicas, one GPU of a node each, over a ring."""
    rate, latency_s = NIC[nic]
    rounds = 2 if operation == "all-reduce" else 1
    return rounds * (count - 1) * (latency_s + size / count / rate)


def pass_of(part: Part, device: DeviceType, tensor: int) -> Pass:
    """The time of kernels and collectives, by term."""
    terms: dict[str, float] = {}
    launch = device.launch_overhead_s
    for kind, kernels in by_kind(part.kernels).items():
        terms[kind] = kernels_s(kernels, device) - launch * len(kernels)
    terms["launch"] = launch * len(part.kernels)
    terms["tp"] = terms["slow-down"] = 0.0
    for collective in part.collectives:
        alone = tensor_s(device.name, tensor, collective.operation, collective.bytes)
        covered = kernels_s(collective.during, device)
        both = overlapped_s(device, covered, alone)
        terms["slow-down"] += min(both - covered, alone) if covered > alone else 0.0
        terms["tp"] += both - covered if covered <= alone else 0.0
    return Pass(terms)


def stages_of(run: Run, device: DeviceType) -> list[tuple[Pass, Pass]]:
    """F and B of every stage, in order."""
    forward, backward, attention = (pass_of(part, device, run.tensor) for part in layer(run.model, run.how))
    again = {"none": Pass(), "selective": attention, "full": forward}[run.recompute]
    first, last = ([pass_of(p, device, run.tensor) for p in make(run.model, run.how)] for make in (embedding, head))
    count = run.pipeline * run.chunks
    message = HALF * run.samples * run.model.sequence * run.model.hidden / (run.tensor if run.spread else 1)
    rate, latency_s = NIC[run.nic]
    wait = Pass({"p2p": latency_s + message / rate} if run.blocking and run.pipeline > 1 else {})
    layers = layers_of(run.model.layers, count)
    found = []
    for stage, own in enumerate(layers):
        there, back = forward.times(own) + wait, (backward + again).times(own) + wait
        for at, extra in ((0, first), (count - 1, last)):
            if stage == at:
                there, back = there + extra[0], back + extra[1]
        found.append((there, back))
    return found


def layers_of(layers: int, stages: int) -> list[int]:
    """Layers of each stage: equally many, or with the embedding and the head as one each."""
    if layers % stages == 0:
        return [layers // stages] * stages
    each = (layers + 2) // stages
    assert each * stages == layers + 2, f"{layers} layers in {stages} stages"
    return [each - 1, *[each] * (stages - 2), each - 1]


def pipeline_s(run: Run, stages: Sequence[tuple[Pass, Pass]]) -> tuple[float, int]:
    """Seconds of the schedule in the simulator, and the device that computes longest."""
    names = [f"stage{number}" for number in range(len(stages))]
    busy = [sum(f.seconds + b.seconds for f, b in stages[device :: run.pipeline]) for device in range(run.pipeline)]
    longest = busy.index(max(busy))
    if run.pipeline == 1:
        return run.microbatches * busy[0], 0
    size = HALF * run.samples * run.model.sequence * run.model.hidden // (run.tensor if run.spread else 1)
    nodes = [OpNode(name, f.seconds, b.seconds / 2, b.seconds / 2) for name, (f, b) in zip(names, stages, strict=True)]
    edges = [OpEdge(a, b, 1 if run.blocking else size) for a, b in pairwise(names)]
    graph = OpGraph(tuple(nodes), tuple(edges))
    cut = [[name] for name in names]
    cluster = _ranks(run)
    costs = stage_costs(graph, cut)
    hop_s = cluster.transfer_s(0, 1, edges[0].bytes)
    problem = ScheduleProblem(run.pipeline, run.microbatches, run.chunks, costs, hop_s)
    if run.chunks == 1:
        schedule = find_family("1f1b").build(problem)
    else:
        schedule = find_family("interleaved-1f1b").build(problem, rounds=run.microbatches // run.pipeline)
    assert stage_edges(graph, cut)
    return simulate(assemble(graph, cut, schedule), costs, cluster).step_s, longest


def _ranks(run: Run) -> Cluster:
    rate, latency_s = (1e15, 0.0) if run.blocking else NIC[run.nic]
    return fully_connected(run.pipeline, 10**15, rate, latency_s)


def predicted(run: Run, device: DeviceType | None = None) -> dict[str, float]:
    """Seconds of a step by term; they sum to the step."""
    device = device or find_device(run.device)
    stages = stages_of(run, device)
    step_s, longest = pipeline_s(run, stages)
    own = sum((f + b for f, b in stages[longest :: run.pipeline]), Pass()).times(run.microbatches)
    terms = dict.fromkeys(TERMS, 0.0) | own.terms
    terms["bubble"] = max(0.0, step_s - own.seconds)
    terms |= _data_terms(run, device, stages[longest :: run.pipeline], terms)
    moved = run.parameters * find_optimizer("adam-master").moved_bytes(HALF)
    rate = device.peak_memory_bytes_per_s * device.efficiency["elementwise"]
    terms["optimizer"] = moved / rate / (1 if run.sharded == "nothing" else run.data)
    return terms


def _data_terms(
    run: Run, device: DeviceType, own: Sequence[tuple[Pass, Pass]], terms: dict[str, float]
) -> dict[str, float]:
    """Exposed communication of replicas, and what the rest of it costs the computation that it overlaps."""
    if run.data == 1:
        return {}

    def alone(operation: str, size: float) -> float:
        inside = run.gpus <= 8
        return (tensor_s(device.name, run.data, operation, size) if inside
                else data_s(run.nic, run.data, operation, size))  # fmt: skip

    if run.sharded == "parameters":
        return _gathered(run, device, own, terms, alone)
    size = run.sum_bytes * run.parameters
    if run.sharded == "nothing":
        reduced = alone("all-reduce", size)
    else:
        reduced = alone("reduce-scatter", size) + alone("all-gather", HALF * run.parameters)
    if not run.overlapped:
        return {"dp": reduced}
    covered = sum(backward.seconds for _, backward in own)
    both = overlapped_s(device, covered, reduced)
    exposed = max(0.0, reduced - covered)
    return {"dp": exposed, "slow-down": terms["slow-down"] + both - covered - exposed}


def _gathered(
    run: Run,
    device: DeviceType,
    own: Sequence[tuple[Pass, Pass]],
    terms: dict[str, float],
    alone: Callable[[str, float], float],
) -> dict[str, float]:
    """FSDP: parameters are gathered for F and again for B, gradients reduced and scattered, in each microbatch."""
    size = HALF * (run.model.layers * run.model.layer_parameters + run.model.vocabulary * run.model.hidden)
    gather, scatter = alone("all-gather", size), alone("reduce-scatter", size)
    if run.gpus > 8:  # the GPUs of a node share its NICs and its NVLinks: a ring over all GPUs, at a NIC's rate each
        rate, _ = NIC[run.nic]
        gather = scatter = (run.gpus - 1) / run.gpus * size / (8 * rate) + (run.gpus - 1) * 2e-6
    exposed = slow = 0.0
    for compute, communication in ((own[0][0].seconds, gather), (own[0][1].seconds, gather + scatter)):
        both = overlapped_s(device, compute, communication)
        exposed += max(0.0, communication - compute)
        slow += both - compute - max(0.0, communication - compute)
    first = gather / run.model.layers
    return {
        "dp": run.microbatches * (exposed + first),
        "slow-down": terms["slow-down"] + run.microbatches * slow,
    }


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51200) -> Model:
    """GPT as Megatron-LM trained it in 2021 and 2022: attention written out, dropout, biases."""
    return Model(layers, hidden, heads, vocabulary, 2048, dropout=True)


KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, tables 3 and 5"
NARAYANAN = "Narayanan et al., arXiv 2104.04473, table 2"
SMITH = "Smith et al., arXiv 2201.11990, section 2.3"
LLAMA = "Llama 3, arXiv 2407.21783, section 3.3.2 and table 4"
MPT = "llm-foundry, scripts/train/benchmarking/README.md"
GPT_22B, GPT_175B = gpt(48, 6144, 64), gpt(96, 12288, 96)
GPT_530B, GPT_1T = gpt(105, 20480, 128), gpt(128, 25600, 160)
SHAPES = {"22B": (GPT_22B, 4, 4, 1, 1), "175B": (GPT_175B, 1, 64, 8, 3),
          "530B": (GPT_530B, 1, 280, 35, 3), "1T": (GPT_1T, 1, 512, 64, 1)}  # fmt: skip
"""Model, samples of a microbatch, batch, pipeline and chunks of Korthikanti's table 3."""
TIMES = {"22B": (1.42, 1.10), "175B": (18.13, 13.75), "530B": (49.05, 37.83), "1T": (94.42, 71.49)}
"""Seconds of a step with full recomputation, and with sequence parallelism and selective recomputation."""


def _korthikanti() -> list[Run]:
    found = []
    for size, (model, samples, batch, pipeline, chunks) in SHAPES.items():
        run = Run(f"GPT {size}, full recomputation", KORTHIKANTI, model, "A100-80GB", 8 * pipeline, samples, batch, 8,
                  pipeline, chunks, "full", step_s=TIMES[size][0])  # fmt: skip
        found += [run, evolve(run, name=f"GPT {size}, selective", recompute="selective", by_tokens=True,
                              step_s=TIMES[size][1])]  # fmt: skip
    wide = evolve(found[5], name="GPT 530B, selective, 8 replicas", gpus=2240, batch=2240, step_s=39.15)
    return [*found, evolve(wide, source="Korthikanti et al., arXiv 2205.05198, section 6.3")]


def _megatron() -> list[Run]:
    base = Run("", NARAYANAN, GPT_175B, "A100-80GB", 384, 1, 1536, 8, 12, 2, "full", fused_sums=False, sum_bytes=2,
               counted="hardware", assumed="2 chunks")  # fmt: skip
    large = evolve(base, model=GPT_530B, batch=2240, pipeline=35, chunks=3, assumed="")
    rows = [(base, 384, 153), (base, 768, 149), (base, 1536, 141), (large, 560, 171), (large, 1120, 167),
            (large, 2240, 159)]  # fmt: skip
    names = {id(base): "GPT 175B", id(large): "GPT 530B"}
    return [evolve(run, name=f"{names[id(run)]} on {gpus}", gpus=gpus, flops_per_s=rate * 1e12)
            for run, gpus, rate in rows]  # fmt: skip


def _others() -> list[Run]:
    mtnlg = Run("", SMITH, GPT_530B, "A100-80GB", 2240, 1, 1920, 8, 35, 1, "full", assumed="one sample a microbatch")
    bloom = Model(70, 14336, 112, 250880, 2048)
    neox = Model(44, 6144, 64, 50432, 2048, rotary=True)
    llama = Model(126, 16384, 128, 128256, 8192, 8, 53248, gated=True, rotary=True, flash=True, biases=False)
    llama_run = Run("", LLAMA, llama, "H100", 8192, 1, 2048, 8, 16, 8, "none", by_tokens=True, blocking=False,
               sharded="optimizer", overlapped=True, nic="400g", flops_per_s=430e12,
               assumed="one sample a microbatch; sequence parallelism; a ring for each replica dimension")  # fmt: skip
    return [
        *[evolve(mtnlg, name=f"MT-NLG 530B on {gpus}", gpus=gpus, step_s=step_s)
          for gpus, step_s in ((2240, 60.1), (2800, 50.2), (3360, 44.4))],
        Run("BLOOM 176B on 384", "BLOOM, arXiv 2211.05100, section 3.4; BigScience, tr11-176B-ml chronicles", bloom,
            "A100-80GB", 384, 2, 2048, 4, 12, 1, "full", fused_sums=False, sharded="optimizer", nic="100g",
            spread=False, flops_per_s=150e12, counted="hardware",
            assumed="the rate counts 8 FLOPs for each parameter and token"),
        Run("GPT-NeoX-20B on 96", "Black et al., arXiv 2204.06745, section 3; configs/20B.yml", neox, "A100-40GB", 96,
            4, 1536, 2, 4, 1, "full", fused_sums=False, sum_bytes=2, sharded="optimizer", spread=False,
            flops_per_s=117e12, counted="hardware",
            assumed="the rate counts 8 FLOPs for each parameter and token"),
        evolve(llama_run, name="Llama 3 405B on 8192"),
        evolve(llama_run, name="Llama 3 405B on 16384", gpus=16384, flops_per_s=400e12),
    ]  # fmt: skip


def _mpt() -> list[Run]:
    sizes = {"7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 64), "70b": (80, 8192, 64)}
    rows = [
        ("7b", "H100", 8, 6, 48, "none", 10643), ("30b", "H100", 8, 3, 504, "full", 2002),
        ("30b", "H100", 32, 14, 1344, "full", 2308), ("70b", "H100", 64, 8, 2048, "full", 1039),
        ("7b", "A100-80GB", 8, 6, 96, "none", 4641), ("13b", "A100-80GB", 8, 2, 48, "none", 2262),
        ("30b", "A100-80GB", 8, 3, 504, "full", 916), ("70b", "A100-80GB", 64, 8, 2048, "full", 410),
    ]  # fmt: skip
    found = []
    for size, device, gpus, samples, batch, recompute, tokens_per_s in rows:
        layers, hidden, heads = sizes[size]
        model = Model(layers, hidden, heads, 50368, 2048, flash=True, biases=False)
        found.append(
            Run(f"MPT {size} on {gpus} {device}", MPT, model, device, gpus, samples, batch, recompute=recompute,
                fused_sums=False, sum_bytes=2, sharded="parameters", overlapped=True, nic="400g" if device == "H100"
                else "200g", step_s=batch * 2048 / (gpus * tokens_per_s))
        )  # fmt: skip
    return found


RUNS = (*_korthikanti(), *_megatron(), *_others(), *_mpt())
NOT_MODELLED = ("MT-NLG", "BLOOM", "GPT-NeoX")
"""Runs of DeepSpeed's pipeline engine: reported, and used for no fit. The same model in Megatron-LM alone (GPT 530B) is
15 % faster after its shorter bubble is counted; what DeepSpeed adds is not modelled."""
ARCHITECTURES = {"A100": "A100", "H100": "H100"}
"""Devices by the beginning of their names: the runs of each determine one number."""
LEVEL = 0.9


@frozen
class Outcome:
    """A run and its predicted seconds by term, at the catalogue's ``sustained``."""

    run: Run
    terms: dict[str, float] = field(hash=False)

    @property
    def architecture(self) -> str:
        return next(name for start, name in ARCHITECTURES.items() if self.run.device.startswith(start))

    @property
    def fits(self) -> bool:
        return not self.run.name.startswith(NOT_MODELLED)

    def error(self, sustained: float | None = None) -> float:
        """Predicted ÷ published − 1, at another ``sustained``: products and attention change, bubbles in proportion."""
        once = sum(self.terms[name] for name in ("bubble", "dp", "optimizer"))
        busy = sum(self.terms.values()) - once
        if sustained is None:
            return (busy + once) / self.run.measured_s - 1
        limited = self.terms["matmul"] + self.terms["attention"]
        known = find_device(self.run.device).sustained or 1.0
        scale = 1 + limited / busy * (known / sustained - 1)
        return (scale * (busy + self.terms["bubble"]) + once - self.terms["bubble"]) / self.run.measured_s - 1


def fitted(outcomes: Sequence[Outcome]) -> float:
    """The share that training sustains, by least squares of the logarithms of predicted ÷ published."""
    choices = [number / 1000 for number in range(400, 1201)]
    return min(choices, key=lambda share: sum(math.log1p(each.error(share)) ** 2 for each in outcomes))


def held_out(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Error of each run at the share fitted to the other runs of its architecture."""
    found = {}
    for outcome in outcomes:
        same = [other for other in outcomes if other.fits and other.architecture == outcome.architecture]
        found[outcome.run.name] = outcome.error(fitted([other for other in same if other is not outcome]))
    return found


def summary(errors: Iterable[float]) -> str:
    sizes = sorted(map(abs, errors))
    bound = sizes[math.ceil(LEVEL * len(sizes)) - 1]
    return f"median {statistics.median(sizes):.1%}, 90 % below {bound:.1%}, worst {sizes[-1]:.1%}"


def layers() -> list[list[str]]:
    """One layer of GPT 22B, which Korthikanti's table 4 times alone: before anything is fitted, and with what is."""
    published = {False: (7.7, 11.9), True: (7.2, 11.8)}
    rows = []
    for by_tokens, milliseconds in published.items():
        for title, share in (("isolated", None), ("sustained", find_device("A100-80GB").sustained)):
            device = evolve(find_device("A100-80GB"), sustained=share)
            forward, backward, _ = layer(GPT_22B, Sharding(4, 8, by_tokens))
            times = [1e3 * pass_of(part, device, 8).seconds for part in (forward, backward)]
            name = f"{'sequence parallel' if by_tokens else 'tensor parallel'}, {title}"
            rows.append([name, *(f"{ours:.1f} / {theirs} ({ours / theirs - 1:+.0%})"
                                 for ours, theirs in zip(times, milliseconds, strict=True))])  # fmt: skip
    return rows


def report(outcomes: Sequence[Outcome]) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of all runs, and the lines of the fit."""
    alone = held_out(outcomes)
    rows = []
    for outcome in outcomes:
        step_s = sum(outcome.terms.values())
        rows.append([outcome.run.name, outcome.run.source, outcome.run.assumed or "–", f"{outcome.run.measured_s:.3g}",
                     f"{step_s:.3g}", f"{outcome.error():+.1%}", f"{alone[outcome.run.name]:+.1%}",
                     *(f"{outcome.terms[name] / step_s:.1%}" for name in TERMS)])  # fmt: skip
    fit = [each for each in outcomes if each.fits]
    lines = [["runs of Megatron-LM, Llama 3 and FSDP, as predicted", f"{len(fit)}", summary(o.error() for o in fit)],
             ["the same, each at the share fitted to the others", f"{len(fit)}",
              summary(alone[o.run.name] for o in fit)],
             ["nothing fitted: products as fast as isolated ones", f"{len(fit)}", summary(o.error(1.0) for o in fit)],
             ["all runs, with those of DeepSpeed", f"{len(outcomes)}",
              summary(o.error() for o in outcomes)]]  # fmt: skip
    for name in ARCHITECTURES.values():
        own = [each for each in fit if each.architecture == name]
        other = fitted([each for each in fit if each.architecture != name])
        lines += [[f"{name}: sustained, fitted", f"{len(own)}", f"{fitted(own):.3f}"],
                  [f"{name} at the share of the other architecture", f"{len(own)}",
                   summary(each.error(other) for each in own)]]  # fmt: skip
    return rows, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", help="append the tables to this Markdown file")
    arguments = parser.parse_args()
    outcomes = []
    for run in RUNS:
        outcomes.append(Outcome(run, predicted(run)))
        print(f"{run.name}: {run.measured_s:.3g} s, predicted {outcomes[-1].error():+.1%}", flush=True)
    rows, lines = report(outcomes)
    tables = (
        ("Errors of predicted steps", ("runs", "number", "error"), lines),
        ("Published training runs", ("run", "source", "assumed", "published s", "predicted s", "error", "left out",
                                     *TERMS), rows),
        ("One layer of GPT 22B on 8 A100, ours / published ms", ("layer", "F", "B"), layers()),
    )  # fmt: skip
    for title, header, table in tables:
        print(f"\n{title}\n{' | '.join(header)}")
        for row in table:
            print(" | ".join(row))
        if arguments.record:
            record(arguments.record, title, machine(), header, table)


if __name__ == "__main__":
    main()
