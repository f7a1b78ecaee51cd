"""Processor seconds of set-up by phase, of an evaluation's, and of a new size.

    python benchmarks/runtime/new_sizes.py [--pipelines] [--record FILE]

Small transformers of two layers are captured twice, for one length and with symbolic lengths; the first one once
before, because that also loads torch. An evaluation is captured without gradients. `new size` is what a further length
costs: numbers in place of the symbols of all stage programs.

With ``--pipelines`` the default call of `panpipe.pipeline` is sampled: a thousand times in a second of processor time,
the innermost function of the package is looked up in `PHASES`.
"""

import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import panpipe
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step, symbolic_sizes
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import stage_graph
from panpipe.core.garbage import rare_collections
from panpipe.core.search.compiling import compile_ahead
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.driver import argument_parser, report

SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZE, use_cache=False)),
    "BERT": lambda: BertForMaskedLM(BertConfig(**SIZE)),
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, use_cache=False)),
    "T5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
        )
    ),
}
LENGTH, STAGES = 12, 2


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


@rare_collections()  # as panpipe.pipeline
@symbolic_sizes()
def phases(model: nn.Module, symbolic: bool, gradients: bool = True) -> dict[str, str]:
    """Processor seconds of each phase, as text; without gradients, those of an evaluation."""
    batch = {name: torch.ones(2, LENGTH, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
    times = [time.process_time()]
    dims = dict.fromkeys(range(len(batch)), (1,)) if symbolic else None
    captured = capture_step(model, step, batch, symbolic=dims, gradients=gradients)
    times.append(time.process_time())
    operators = operators_of(captured)
    times.append(time.process_time())
    names = [node.name for node in operators.graph.nodes]
    cuts = [names[len(names) * i // STAGES : len(names) * (i + 1) // STAGES] for i in range(STAGES)]
    programs = [stage_programs(stage_graph(operators, cuts, i)) for i in range(STAGES)]
    times.append(time.process_time())
    found = {
        name: f"{end - start:.2f}"
        for name, start, end in zip(("export", "operators", "programs"), times[:-1], times[1:], strict=True)
    }
    found["all"] = f"{times[-1] - times[0]:.2f}"
    if captured.sizes is not None:
        captured.sizes.values(dict.fromkeys(range(len(batch)), (2, LENGTH + 1)))  # collects the guards once
        start = time.process_time()
        sizes = captured.sizes.values(dict.fromkeys(range(len(batch)), (2, LENGTH + 7)))
        assert sizes is not None
        for each in programs:
            each.with_sizes(sizes)
        found["new size"] = f"{time.process_time() - start:.4f}"
    return found


ROOT = Path(__file__).resolve().parents[2]
PHASES = {
    "core/capture/batch/": "sample dimensions",
    "core/capture/python/": "guards and changes",
    "core/capture/export/operators.py": "operators",
    "core/capture/": "export",
    "core/capture/programs/joint_graph.py": "joint graphs",
    "core/capture/programs/": "programs",
    "runtimes/batch/": "sample dimensions",
    "runtimes/planning/": "planning",
    "runtimes/profile/measured_cluster.py": "links",
    "runtimes/profile/message_profile.py": "links",
    "runtimes/profile/": "profile",
    "core/costs/": "profile",
    "core/search/": "search",
    "core/schedules/": "search",
    "core/timing/": "search",
    "core/numba_cache.py": "search",
    "core/analytic/": "operators",
    "core/": "plans",
    "": "other",
}
"""Beginning of a file's path in the package → phase; the longest one counts."""


@contextmanager
def sampled(found: Counter[str]) -> Iterator[None]:
    """Count samples of the main thread by phase within this context."""
    known: dict[str, str] = {}

    def phase(file: str) -> str:
        path = file.removeprefix(f"{ROOT}/")
        inside = path != file and not path.startswith((".venv", "benchmarks"))
        return PHASES[max((begin for begin in PHASES if path.startswith(begin)), key=len)] if inside else ""

    def count(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in known:
                known[file] = phase(file)
            if known[file]:
                found[known[file]] += 1
                return
            frame = frame.f_back

    before = signal.signal(signal.SIGPROF, count)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0, 0)
        signal.signal(signal.SIGPROF, before)


def resnet() -> nn.Module:
    return ResNetForImageClassification(ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512],
                                                     depths=[2, 2, 2, 2], layer_type="basic"))  # fmt: skip


def unet() -> nn.Module:
    from tests.laws.zoo.vision import UNet

    return UNet()


def gpt2() -> nn.Module:
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(use_cache=False))


def images(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model(batch["x"])
    scores = getattr(found, "logits", found)
    return nn.functional.cross_entropy(scores.flatten(1), batch["y"])


def pipelines() -> list[tuple[str, Counter[str], float]]:
    """The samples by phase, and the processor seconds, of the default call for several models."""
    text = {name: torch.ones(8, 64, dtype=torch.int64) for name in ("input_ids", "labels")}
    pictures = {"x": torch.randn(8, 3, 32, 32), "y": torch.zeros(8, dtype=torch.int64)}
    simulated = {"backend": "simulator", "devices": "2xA100-40GB"}
    cases: list[tuple[str, Any, Any, Any, dict[str, Any]]] = [
        *((name, MODELS[name], step, text, {}) for name in ("Llama", "Llama", "BERT", "T5")),
        ("ResNet-18", resnet, images, pictures, {}),
        ("UNet", unet, images, pictures, {}),
        ("GPT-2 on meta", gpt2, step, text, simulated),
    ]
    compile_ahead(print)  # as after an installation by `make`: half a minute of a new checkout
    rows = []
    for name, make, function, batch, options in cases:
        found, model = Counter[str](), make()
        start = time.process_time()
        with sampled(found), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = panpipe.pipeline(
                model, function, batch, optimizer=torch.optim.AdamW, microbatches=4, plan=panpipe.Auto(cache=False),
                run=panpipe.Run(progress=False, weights=getattr(model, "_init_weights", None)), **options,
            )  # fmt: skip
        rows.append((name, found, time.process_time() - start))
        pipe.close()
    return rows[1:]  # the first model loads torch


def by_phase(rows: list[tuple[str, Counter[str], float]]) -> tuple[list[str], list[list[str]]]:
    """The table of processor seconds by phase."""
    names = list(dict.fromkeys(PHASES.values()))
    table = [
        [name, *(f"{found[phase] / max(found.total(), 1) * seconds:.2f}" for phase in names), f"{seconds:.2f}"]
        for name, found, seconds in rows
    ]
    return ["model", *names, "all"], table


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--pipelines", action="store_true", help="sample the default call")
    arguments = parser.parse_args()
    if arguments.pipelines:
        report(arguments.record, "Processor seconds of panpipe.pipeline", *by_phase(pipelines()))
        return
    phases(MODELS["Llama"](), symbolic=False)
    rows = [
        (name, f"{'training' if training else 'evaluation'}, {'any' if any_length else 'one'} length",
         phases(make(), any_length, training))
        for name, make in MODELS.items()
        for training in (True, False)
        for any_length in (False, True)
    ]  # fmt: skip
    columns = ("export", "operators", "programs", "all", "new size")
    cells = [[name, kind, *(found.get(c, "") for c in columns)] for name, kind, found in rows]
    report(arguments.record, "Processor seconds of set-up", ["model", "captured for", *columns], cells)


if __name__ == "__main__":
    main()
