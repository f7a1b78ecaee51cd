"""Published training runs against ``panpipe plan``: step times, and memory where it is published.

Every run of ``runs.toml`` is one of a paper, a vendor or a repository. Its model is the ``config.json`` of a model of
transformers, its configuration is options of ``panpipe plan``, and the prediction is what that prints with ``--json``.
``assumed`` lists what the source does not state. The rates of devices are fitted to the runs marked as fitted, and the
others are reported apart.

    python benchmarks/published/published_runs.py [NAME…] [--record FILE]
"""

import json
import math
import statistics
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from attrs import Factory, field, frozen
from panpipe.benchmarks.driver import argument_parser, report
from panpipe.cli import main as panpipe
from panpipe.core.validation.interval import OTHER, SHARDED, TENSOR

HERE = Path(__file__).parent


@frozen(kw_only=True)
class Run:
    """A published run.

    Args:
        name: what it is called here.
        source: of its figures.
        model: a name in ``MODELS``.
        cluster: name, of the catalogue or of a device in ``devices.toml``.
        samples: of a step.
        sequence: tokens of a sample.
        microbatches: of a step, over all replicas.
        options, more: of ``panpipe plan``.
        tokens_per_s: published, of each GPU.
        tflops: published, of each GPU, in 10¹² FLOPs a second, by the source's own count of FLOPs.
        memory_gib: published peak of the fullest device; None if it is not published.
        fitted: whether rates of the catalogue are fitted to it.
        assumed: what the source does not state.
        step_s: seconds of a step, where they are published in place of a rate.
    """

    name: str
    source: str
    model: str
    cluster: str
    samples: int
    sequence: int
    microbatches: int
    options: str
    more: str
    tokens_per_s: float | None = None
    tflops: float | None = None
    memory_gib: float | None = None
    fitted: bool = False
    assumed: str = ""
    step_s: float = Factory(lambda run: run.derived_step_s(), takes_self=True)

    def derived_step_s(self) -> float:
        """Seconds of a step by the published rate."""
        tokens, gpus = self.samples * self.sequence, math.prod(map(int, self.cluster.split("x")[:-1]))
        if self.tokens_per_s is not None:
            return tokens / (gpus * self.tokens_per_s)
        assert self.tflops is not None
        config = MODELS[self.model]
        if config["model_type"] == "llama":
            # Llama 3: 6 for each parameter and token, and attention without the part that is masked.
            flops = tokens * (6 * 405e9 + 6 * 126 * 16384 * self.sequence)
        else:
            # Narayanan et al., formula (3), which counts the recomputation.
            layers, hidden = config["n_layer"], config["n_embd"]
            flops = 96 * tokens * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
        return flops / (gpus * self.tflops * 1e12)

    @property
    def kind(self) -> str:
        """What limits the accuracy of its prediction, as ``published_kind``."""
        words = f"{self.options} {self.more}".split()
        ranks = {name: words[words.index(name) + 1] for name in ("--cp", "--tp") if name in words}
        if ranks.get("--cp", "1") != "1":
            return OTHER
        return SHARDED if "parameters" in words else TENSOR if ranks.get("--tp", "1") != "1" else OTHER

    def arguments(self, folder: Path) -> list[str]:
        """The arguments of ``panpipe plan``; writes the model's configuration."""
        file = folder / "config.json"
        file.write_text(json.dumps(MODELS[self.model]), encoding="utf-8")
        devices = HERE / "devices.toml"
        own = f"[devices.{self.cluster.split('x')[-1]}]" in devices.read_text(encoding="utf-8")
        return [
            "plan", "--model", str(file), "--cluster", f"{devices}#{self.cluster}" if own else self.cluster, "--batch",
            str(self.samples), "--sequence", str(self.sequence), "--microbatches", str(self.microbatches), "--layers",
            "--budget", "100", "--dtype", "bf16", *self.options.split(), *self.more.split(), "--json",
        ]  # fmt: skip


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
MODELS = {
    "gpt-5b": gpt(24, 4096, 32, **NO_DROPOUT), "gpt-20b": gpt(44, 6144, 48, **NO_DROPOUT),
    "gpt-175b": gpt(96, 12288, 96, **NO_DROPOUT), "gpt-22b-eager": gpt(48, 6144, 64, **WRITTEN_OUT),
    "gpt-175b-eager": gpt(96, 12288, 96, **WRITTEN_OUT), "gpt-530b-eager": gpt(105, 20480, 128, **WRITTEN_OUT),
    "gpt-1t-eager": gpt(128, 25600, 160, **WRITTEN_OUT), "mpt-7b": gpt(32, 4096, 32, 50368, **NO_DROPOUT),
    "mpt-13b": gpt(40, 5120, 40, 50368, **NO_DROPOUT), "mpt-30b": gpt(48, 7168, 64, 50368, **NO_DROPOUT),
    "mpt-70b": gpt(80, 8192, 64, 50368, **NO_DROPOUT), "nemotron-8b": nemotron(32, 4096, 32, 32),
    "nemotron-22b": nemotron(40, 6144, 48, 48), "nemotron-340b": nemotron(96, 18432, 96, 8),
    "llama-7b": llama(32, 4096, 32, 32, 11008), "llama-13b": llama(40, 5120, 40, 40, 13824),
    "llama-34b": llama(48, 8192, 64, 8, 22016), "llama-70b": llama(80, 8192, 64, 8, 28672),
    "llama-3-8b": llama(32, 4096, 32, 8, 14336, 128256), "llama-3-70b": llama(80, 8192, 64, 8, 28672, 128256),
    "llama-3-405b": llama(126, 16384, 128, 8, 53248, 128256),
}  # fmt: skip


def published() -> Iterator[Run]:
    """The runs of ``runs.toml``, whose groups have what their rows share."""
    for group in tomllib.loads((HERE / "runs.toml").read_text(encoding="utf-8"))["groups"]:
        columns, rows = group.pop("columns"), group.pop("rows")
        for row in rows:
            yield Run(**group, **dict(zip(columns, row, strict=True)))


RUNS = tuple(published())


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
        if self.answer is None or self.run.memory_gib is None:
            return None
        return float(max(self.answer["peak_memory_bytes"]) / (self.run.memory_gib * 2**30) - 1)


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
    report(arguments.record, "Errors of predicted steps", ("runs", "number", "error"), lines)
    report(arguments.record, "Published training runs", header, rows)


if __name__ == "__main__":
    main()
