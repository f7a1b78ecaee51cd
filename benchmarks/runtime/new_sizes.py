"""Processor seconds of a step's set-up by phase, of an evaluation's, and of a new size: for small transformers of two
layers.

    python benchmarks/runtime/new_sizes.py [--record FILE]

Each model is captured twice, for one length and with symbolic lengths; the first model once before, because that also
loads torch. An evaluation is captured without gradients. `new size` is what a further length costs: numbers in place of
the symbols of all stage programs.
"""

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step, symbolic_sizes
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import stage_graph
from panpipe.core.garbage import rare_collections
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
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


@rare_collections()  # as panpipe.pipeline
@symbolic_sizes()
def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
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
    title, header = "Processor seconds of set-up", ["model", "captured for", *columns]
    report(arguments.record, title, header, cells)


if __name__ == "__main__":
    main()
