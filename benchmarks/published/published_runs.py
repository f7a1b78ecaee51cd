"""Published training runs against ``panpipe plan``: step times, and memory where it is published.

Every run is one of a paper, a vendor or a repository. Its model is the ``config.json`` of a model of transformers, its
configuration is options of ``panpipe plan``, and the prediction is what that prints with ``--json``. ``assumed`` lists
what the source does not state. The rates of devices are fitted to the runs marked as fitted, and the others are
reported apart.

    python benchmarks/published/published_runs.py [NAME…] [--record FILE]
"""

import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from attrs import field, frozen
from panpipe.benchmarks.driver import argument_parser, report
from panpipe.cli import main as panpipe
from panpipe.core.validation.interval import OTHER, SHARDED, TENSOR


@frozen(kw_only=True)
class Run:
    """A published run.

    Args:
        name: what it is called here.
        source: of its figures.
        config: of its model, as in ``config.json``.
        cluster: name, or a device of ``DEVICES`` in a name.
        samples: of a step.
        sequence: tokens of a sample.
        microbatches: of a step, over all replicas.
        options: of ``panpipe plan``.
        step_s: published seconds of a step.
        memory_bytes: published peak of the fullest device; None if it is not published.
        fitted: whether rates of the catalogue are fitted to it.
        assumed: what the source does not state.
    """

    name: str
    source: str
    config: Mapping[str, Any] = field(hash=False)
    cluster: str
    samples: int
    sequence: int
    microbatches: int
    options: Sequence[str] = ()
    step_s: float
    memory_bytes: float | None = None
    fitted: bool = False
    assumed: str = ""

    @property
    def kind(self) -> str:
        """What limits the accuracy of its prediction, as ``published_kind``."""
        ranks = {name: self.options[self.options.index(name) + 1] for name in ("--cp", "--tp") if name in self.options}
        if ranks.get("--cp", "1") != "1":
            return OTHER
        return SHARDED if "parameters" in self.options else TENSOR if ranks.get("--tp", "1") != "1" else OTHER

    def arguments(self, folder: Path) -> list[str]:
        """The arguments of ``panpipe plan``; writes the model's configuration."""
        file = folder / "config.json"
        file.write_text(json.dumps(self.config), encoding="utf-8")
        (folder / "devices.toml").write_text(DEVICES, encoding="utf-8")
        own = f"[devices.{self.cluster.split('x')[-1]}]" in DEVICES
        return [
            "plan", "--model", str(file), "--cluster", f"{folder / 'devices.toml'}#{self.cluster}" if own else
            self.cluster, "--batch", str(self.samples), "--sequence", str(self.sequence), "--microbatches",
            str(self.microbatches), "--layers", "--budget", "100", "--dtype", "bf16", *self.options, "--json",
        ]  # fmt: skip


DEVICES = """
format = "panpipe.catalog/1"

[devices.H100-HBM2e]
like = "H100"
title = "NVIDIA H100 SXM, 96 GB of HBM2e, 500 W"
aliases = []
memory_bytes = { value = 96_000_000_000, source = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md" }
peak_memory_bytes_per_s = { value = 2400e9, source = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md" }
effective_memory_bytes_per_s = { value = 2150e9, assumed = "the share of its peak that an H200 reaches in a copy" }
sustained = { value = 0.71, assumed = "that of the H100 at 700 W times the cube root of the power, 0.894" }
"""
"""Devices of a run that are not in the catalogue."""


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51200, **more: Any) -> dict[str, Any]:
    """GPT as Megatron-LM trained it."""
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 2048,
            "vocab_size": vocabulary, "activation_function": "gelu_pytorch_tanh", **more}  # fmt: skip


def llama(layers: int, hidden: int, heads: int, groups: int, inner: int, vocabulary: int = 32000) -> dict[str, Any]:
    return {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": groups, "intermediate_size": inner, "vocab_size": vocabulary,
            "tie_word_embeddings": False}  # fmt: skip


def nemotron(layers: int, hidden: int, heads: int, groups: int) -> dict[str, Any]:
    return {"model_type": "nemotron", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": groups, "intermediate_size": 4 * hidden, "vocab_size": 256000}  # fmt: skip


WRITTEN_OUT = {"attn_implementation": "eager"}
"""Attention as products and a softmax."""
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
GPT_22B, GPT_175B = gpt(48, 6144, 64), gpt(96, 12288, 96)
GPT_530B, GPT_1T = gpt(105, 20480, 128), gpt(128, 25600, 160)
GPT_5B, GPT_20B = gpt(24, 4096, 32), gpt(44, 6144, 48)
NEMOTRON_8B, NEMOTRON_22B = nemotron(32, 4096, 32, 32), nemotron(40, 6144, 48, 48)
NEMOTRON_340B = nemotron(96, 18432, 96, 8)
LLAMA_7B, LLAMA_34B = llama(32, 4096, 32, 32, 11008), llama(48, 8192, 64, 8, 22016)
LLAMA_13B, LLAMA_70B = llama(40, 5120, 40, 40, 13824), llama(80, 8192, 64, 8, 28672)
LLAMA_3_8B, LLAMA_3_70B = llama(32, 4096, 32, 8, 14336, 128256), llama(80, 8192, 64, 8, 28672, 128256)
LLAMA_405B = llama(126, 16384, 128, 8, 53248, 128256)

DGX = "NVIDIA, DGX Cloud Benchmarking, performance explorer"
FSDP_BLOG = "PyTorch blog, Maximizing training throughput using PyTorch FSDP (2024)"
FSDP2 = "PyTorch, FSDP2 on 64 A100"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, tables 3 and 5"
NARAYANAN = "Narayanan et al., arXiv 2104.04473, table 2"
LLAMA_3 = "Llama 3, arXiv 2407.21783, section 3.3.2 and table 4"
NEMO = "NVIDIA NeMo 24.07, docs/source/performance/performance_summary.md"
TITAN_TP = "pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
MPT = "llm-foundry, scripts/train/benchmarking/README.md"

ENGINE = ("--kernels", "fused", "--tp-overlap", "all", "--sequence-parallel", "--shard", "optimizer")
"""NeMo with Transformer Engine on Megatron-Core."""


def pipelined(pipeline: int, data: int, tensor: int, chunks: int, recompute: str = "none") -> tuple[str, ...]:
    named = ("--schedule", "1f1b") if chunks == 1 else ("--schedule", "interleaved-1f1b", "--chunks", str(chunks))
    named = () if pipeline == 1 else named
    return ("--mesh", f"pp={pipeline},dp={data}", "--tp", str(tensor), *named, "--recompute", recompute)


def sharded(gpus: int, layers: int, recompute: str = "none") -> tuple[str, ...]:
    """FSDP: a stage for each layer, on one device."""
    return ("--mesh", f"pp=1,dp={gpus}", "--shard", "parameters", "--schedule", "interleaved-1f1b", "--chunks",
            str(layers), "--recompute", recompute)  # fmt: skip


def eights(gpus: int, device: str, options: str = "") -> str:
    """A cluster of nodes with eight GPUs each."""
    return f"{gpus // 8}x8x{device}{options}" if gpus > 8 else f"8x{device}"


def _nemo() -> list[Run]:
    base = {"source": DGX, "sequence": 2048, "config": {**GPT_175B, **NO_DROPOUT}}
    return [
        Run(name="GPT-3 175B on 128 H100", cluster="16x8xH100", samples=256, microbatches=256, step_s=8.31,
            options=(*pipelined(8, 4, 4, 12), *ENGINE), assumed="one sample a microbatch", fitted=True, **base),
        Run(name="GPT-3 175B on 1024 H100", cluster="128x8xH100", samples=2048, microbatches=2048, step_s=8.45,
            options=(*pipelined(8, 32, 4, 12), *ENGINE), assumed="one sample a microbatch", **base),
        Run(name="Nemotron-4 340B on 128 H100", source=DGX, sequence=4096, config=NEMOTRON_340B, cluster="16x8xH100",
            samples=32, microbatches=32, step_s=4.61, options=(*pipelined(8, 2, 8, 12), *ENGINE),
            assumed="one sample a microbatch"),
    ]  # fmt: skip


def _nemo_fp8() -> list[Run]:
    rows = [
        ("GPT-3 5B", GPT_5B, 64, 2048, 4, 2048, 1, 1, 1, 1, 23406),
        ("GPT-3 20B", GPT_20B, 64, 256, 2, 2048, 2, 1, 1, 1, 5851),
        ("GPT-3 175B", GPT_175B, 128, 256, 1, 2048, 4, 8, 1, 6, 716),
        ("GPT-3 175B", GPT_175B, 512, 2048, 2, 2048, 4, 8, 1, 6, 825),
        ("Llama-2 7B", LLAMA_7B, 8, 128, 1, 4096, 1, 1, 1, 1, 16934),
        ("Llama-2 13B", LLAMA_13B, 16, 128, 1, 4096, 1, 4, 1, 10, 8715),
        ("Llama-2 70B", LLAMA_70B, 64, 128, 1, 4096, 4, 4, 1, 20, 1728),
        ("Nemotron 8B", NEMOTRON_8B, 64, 256, 4, 4096, 2, 1, 1, 1, 12507),
        ("Nemotron 22B", NEMOTRON_22B, 64, 256, 2, 4096, 2, 4, 1, 10, 4312),
        ("Nemotron 340B", NEMOTRON_340B, 128, 32, 1, 4096, 8, 8, 1, 12, 326),
        ("Llama-3 8B", LLAMA_3_8B, 8, 128, 1, 8192, 1, 1, 2, 1, 12273),
        ("Llama-3 70B", LLAMA_3_70B, 64, 128, 1, 8192, 4, 4, 2, 5, 1524),
        ("Llama-2 7B, 8192 tokens", LLAMA_7B, 8, 512, 1, 8192, 1, 1, 2, 1, 13907),
        ("Llama-2 7B, 16384 tokens", LLAMA_7B, 16, 256, 1, 16384, 2, 1, 1, 1, 10082),
        ("Llama-2 7B, 32768 tokens", LLAMA_7B, 32, 128, 1, 32768, 2, 1, 2, 1, 6687),
        ("Llama-2 7B, 131072 tokens", LLAMA_7B, 128, 32, 1, 131072, 4, 1, 4, 1, 2260),
        ("Llama-2 7B, 1048576 tokens", LLAMA_7B, 1024, 4, 1, 1048576, 8, 1, 32, 1, 318),
    ]  # fmt: skip
    return [
        Run(name=f"{name} in fp8, on {gpus} H100", source=NEMO, sequence=sequence, samples=samples, assumed="",
            config={**config, **NO_DROPOUT} if config["model_type"] == "gpt2" else config,
            cluster=eights(gpus, "H100"), microbatches=samples // size, step_s=samples * sequence / (gpus * rate),
            fitted=sequence in (16384, 32768, 131072),
            options=(*pipelined(pipeline, gpus // (tensor * pipeline * context), tensor, chunks), *ENGINE, "--cp",
                     str(context), "--dtype", "fp8"))
        for name, config, gpus, samples, size, sequence, tensor, pipeline, context, chunks, rate in rows
    ]  # fmt: skip


def _llama_3() -> list[Run]:
    rows = [(8192, 1, 64, 8192, 2048, 430), (16384, 1, 128, 8192, 2048, 400), (16384, 16, 8, 131072, 128, 380)]
    found = []
    for gpus, context, data, sequence, samples, rate in rows:
        # Their FLOPs: 6 for each parameter and token, and attention without the part that is masked.
        flops = samples * sequence * (6 * 405e9 + 6 * 126 * 16384 * sequence)
        found.append(
            Run(name=f"Llama-3 405B, {sequence} tokens, on {gpus} H100", source=LLAMA_3, cluster=eights(gpus, "H100"),
                config=LLAMA_405B, samples=samples, sequence=sequence, microbatches=samples,
                step_s=flops / (gpus * rate * 1e12), assumed="8 chunks, no recomputation",
                options=(*pipelined(16, data, 8, 8), *ENGINE, "--cp", str(context)))
        )  # fmt: skip
    return found


def _fsdp() -> list[Run]:
    rows = [
        ("Llama-2 7B", LLAMA_7B, "A100-80GB", 128, 3700, "none", True, FSDP_BLOG),
        ("Llama-2 7B", LLAMA_7B, "H100", 96, 7500, "none", False, FSDP_BLOG),
        ("Llama-2 34B", LLAMA_34B, "A100-80GB", 128, 700, "all", False, FSDP_BLOG),
        ("Llama-2 70B", LLAMA_70B, "A100-80GB", 64, 353, "all", True, FSDP2),
    ]  # fmt: skip
    found = []
    for name, config, device, gpus, rate, recompute, fitted, source in rows:
        found.append(
            Run(name=f"{name} on {gpus} {device}", source=source, config=config, cluster=eights(gpus, device),
                samples=2 * gpus, sequence=4096, microbatches=gpus, step_s=2 * 4096 / rate, fitted=fitted,
                options=sharded(gpus, config["num_hidden_layers"], recompute))
        )  # fmt: skip
    for gpus, kernels, dtype, rate, gibibytes, fitted in (
        (8, "eager", "bf16", 5762, 82.4, True), (8, "compiled", "bf16", 6667, 77.0, False),
        (8, "compiled", "fp8", 8532, 76.8, False), (128, "eager", "bf16", 5605, 67.0, False),
        (128, "compiled", "bf16", 6514, 62.0, True), (128, "compiled", "fp8", 8380, 61.8, False),
    ):  # fmt: skip
        name = kernels if dtype == "bf16" else f"{kernels} in {dtype}"
        found.append(
            Run(name=f"Llama-3 8B, {name}, on {gpus} H100-HBM2e", source=TITAN, config=LLAMA_3_8B,
                cluster=eights(gpus, "H100-HBM2e"), samples=2 * gpus, sequence=8192, microbatches=gpus,
                step_s=2 * 8192 / rate, fitted=fitted, memory_bytes=gibibytes * 2**30,
                assumed="every second layer recomputed",
                options=(*sharded(gpus, 32, "every:2"), "--kernels", kernels, "--dtype", dtype))
        )  # fmt: skip
    for context, rate, gibibytes in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0)):
        found.append(
            Run(name=f"Llama-3 8B, {context * 32768} tokens, {context} context ranks, on 8 H100-HBM2e", source=TITAN,
                config=LLAMA_3_8B, cluster="8xH100-HBM2e", samples=8 // context, sequence=context * 32768,
                microbatches=8 // context, step_s=32768 / rate, memory_bytes=gibibytes * 2**30,
                options=(*sharded(8 // context, 32, "all"), "--kernels", "compiled", "--dtype", "fp8", "--cp",
                         str(context)),
                assumed="context ranks share what replicas share")
        )  # fmt: skip
    for overlap, dtype, rate in (("none", "bf16", 597.3), ("all", "bf16", 652.4), ("none", "fp8", 809.8),
                                 ("all", "fp8", 942.4)):  # fmt: skip
        named = f"{'asynchronous ' * (overlap == 'all')}tensor ranks{' in fp8' * (dtype == 'fp8')}"
        found.append(
            Run(name=f"Llama-3 70B, {named}, on 256 H100-HBM2e", source=TITAN_TP, config=LLAMA_3_70B,
                cluster="32x8xH100-HBM2e", samples=512, sequence=8192, microbatches=32,
                step_s=16 * 8192 / (8 * rate), assumed="8,192 tokens, which the source does not state",
                options=(*sharded(32, 80, "all"), "--tp", "8", "--sequence-parallel", "--tp-overlap", overlap,
                         "--kernels", "compiled", "--dtype", dtype))
        )  # fmt: skip
    return found


def _megatron() -> list[Run]:
    eager = ("--kernels", "fused", "--tp-overlap", "backward")
    found = []
    shapes = {"22B": (GPT_22B, 1, 4, 1, 1), "175B": (GPT_175B, 8, 64, 64, 3), "530B": (GPT_530B, 35, 280, 280, 3),
              "1T": (GPT_1T, 64, 512, 512, 1)}  # fmt: skip
    for kind, recompute, more, times in (
        ("full", "all", (), (1.42, 18.13, 49.05, 94.42)),
        ("selective", "attention", ("--sequence-parallel",), (1.10, 13.75, 37.83, 71.49)),
    ):
        for (name, (config, pipeline, batch, microbatches, chunks)), step_s in zip(shapes.items(), times, strict=True):
            found.append(
                Run(name=f"GPT {name}, {kind} recomputation", source=KORTHIKANTI, config={**config, **WRITTEN_OUT},
                    cluster=eights(8 * pipeline, "A100-80GB", ":nics=8"), samples=batch, sequence=2048,
                    microbatches=microbatches, step_s=step_s, fitted=kind == "full" and name in ("22B", "530B"),
                    options=(*pipelined(pipeline, 1, 8, chunks, recompute), *eager, *more))
            )  # fmt: skip
    rows = [("175B", GPT_175B, 384, 153, 12, 2, 1536, True), ("175B", GPT_175B, 768, 149, 12, 2, 1536, False),
            ("175B", GPT_175B, 1536, 141, 12, 2, 1536, False), ("530B", GPT_530B, 560, 171, 35, 3, 2240, False),
            ("530B", GPT_530B, 1120, 167, 35, 3, 2240, True)]  # fmt: skip
    for name, config, gpus, rate, pipeline, chunks, batch, fitted in rows:
        data = gpus // (8 * pipeline)
        layers, hidden = config["n_layer"], config["n_embd"]
        # Their formula (3), which counts the recomputation.
        flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
        found.append(
            Run(name=f"GPT {name} on {gpus} A100", source=NARAYANAN, config={**config, **WRITTEN_OUT},
                cluster=eights(gpus, "A100-80GB", ":nics=8"), samples=batch, sequence=2048, microbatches=batch,
                step_s=flops / (gpus * rate * 1e12), fitted=fitted,
                options=(*pipelined(pipeline, data, 8, chunks, "all"), *eager),
                assumed="2 chunks" if name == "175B" else "")
        )  # fmt: skip
    return found


def _mpt() -> list[Run]:
    sizes = {"7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 64), "70b": (80, 8192, 64)}
    rows = [
        ("7b", "H100", 8, 6, 48, "none", 10643, False), ("30b", "H100", 8, 3, 504, "all", 2002, True),
        ("30b", "H100", 32, 14, 1344, "all", 2308, False), ("70b", "H100", 64, 8, 2048, "all", 1039, True),
        ("7b", "A100-80GB", 8, 6, 96, "none", 4641, True), ("13b", "A100-80GB", 8, 2, 48, "none", 2262, False),
        ("30b", "A100-80GB", 8, 3, 504, "all", 916, False), ("70b", "A100-80GB", 64, 8, 2048, "all", 410, True),
    ]  # fmt: skip
    found = []
    for size, device, gpus, samples, batch, recompute, rate, fitted in rows:
        layers, hidden, heads = sizes[size]
        found.append(
            Run(name=f"MPT {size} on {gpus} {device}", source=MPT,
                config=gpt(layers, hidden, heads, 50368, **NO_DROPOUT), cluster=eights(gpus, device), samples=batch,
                sequence=2048, microbatches=batch // samples, step_s=batch * 2048 / (gpus * rate), fitted=fitted,
                options=sharded(gpus, layers, recompute), assumed="the layers of GPT, with flash attention")
        )  # fmt: skip
    return found


RUNS = (*_nemo(), *_nemo_fp8(), *_llama_3(), *_fsdp(), *_megatron(), *_mpt())


@frozen
class Outcome:
    """A run and what ``panpipe plan`` answers.

    Args:
        run: the run.
        answer: the JSON; None if it was refused.
        said: the last line of the refusal.
        processor_s: processor time of the plan.
    """

    run: Run
    answer: Mapping[str, Any] | None = field(hash=False)
    said: str
    processor_s: float

    @property
    def error(self) -> float:
        """Predicted ÷ published − 1; infinite if it was refused."""
        return math.inf if self.answer is None else self.answer["predicted_step_s"] / self.run.step_s - 1

    @property
    def memory_error(self) -> float | None:
        if self.answer is None or self.run.memory_bytes is None:
            return None
        return float(max(self.answer["peak_memory_bytes"]) / self.run.memory_bytes - 1)


def planned(run: Run) -> Outcome:
    """The answer of ``panpipe plan`` for a run."""
    out, err, start = StringIO(), StringIO(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(out), redirect_stderr(err):
        status = panpipe(run.arguments(Path(folder)))
    said = "" if status == 0 else err.getvalue().partition("panpipe: ")[2].splitlines()[0]
    return Outcome(run, json.loads(out.getvalue()) if status == 0 else None, said, time.process_time() - start)


def summary(errors: Iterable[float]) -> str:
    """Median and worst of the sizes of relative errors."""
    sizes = sorted(map(abs, errors))
    return f"median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}" if sizes else "–"


def tables(outcomes: Sequence[Outcome]) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of all runs, and the lines of the summary."""
    rows = [
        [o.run.name, o.run.source, o.run.assumed or "–", "yes" if o.run.fitted else "no", f"{o.run.step_s:.3g}",
         o.said if o.answer is None else f"{o.answer['predicted_step_s']:.3g}", f"{o.error:+.1%}",
         "–" if o.memory_error is None else f"{o.memory_error:+.1%}", f"{o.processor_s:.0f}"]
        for o in outcomes
    ]  # fmt: skip
    groups = {
        "all": outcomes,
        "fitted": [o for o in outcomes if o.run.fitted],
        "not fitted": [o for o in outcomes if not o.run.fitted],
        **{kind: [o for o in outcomes if o.run.kind == kind] for kind in dict.fromkeys(o.run.kind for o in outcomes)},
        **{kind: [o for o in outcomes if kind in o.run.cluster] for kind in ("A100", "H100")},
    }
    lines = [[name, f"{len(own)}", summary(o.error for o in own)] for name, own in groups.items()]
    memory = [o.memory_error for o in outcomes if o.memory_error is not None]
    return rows, [*lines, ["memory, where published", f"{len(memory)}", summary(memory)]]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of the runs to plan; all if none is given")
    arguments = parser.parse_args()
    outcomes = []
    for run in RUNS:
        if not arguments.names or any(name in run.name for name in arguments.names):
            outcomes.append(planned(run))
            one = outcomes[-1]
            what = one.said or f"{one.answer['predicted_step_s']:.3g} s, {one.error:+.1%}"  # type: ignore[index]
            print(f"{run.name}: {run.step_s:.3g} s, predicted {what} ({one.processor_s:.0f} s)", flush=True)
    rows, lines = tables(outcomes)
    header = ("run", "source", "assumed", "fitted", "published s", "predicted s", "error", "memory", "processor s")
    for title, names, table in (("Errors of predicted steps", ("runs", "number", "error"), lines),
                                ("Published training runs", header, rows)):  # fmt: skip
        report(arguments.record, title, names, table)


if __name__ == "__main__":
    main()
