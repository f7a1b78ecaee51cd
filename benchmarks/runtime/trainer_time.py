"""Processor time of a short fine-tuning with PanpipeTrainer on two ranks, next to Trainer in one process.

    python benchmarks/runtime/trainer_time.py [--steps 20] [--record FILE]

A BERT of four layers classifies texts of unequal lengths, which the collator pads to the longest one of a batch. All
of a process counts: imports, capture, planning, the comparison of plans, and training. `--importtime` of Python and
`cProfile` find what takes the time: ``RANK`` and the like are ordinary variables, so one rank can run under them.
"""

import os
import subprocess
import sys
import tempfile
import time

WORDS, ROWS, BATCH = 1000, 320, 16
COMPILED = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
"""The environment of processes that read compiled modules, as those of an installed package are."""


def fine_tune(kind: str, steps: int, folder: str) -> None:
    """Train, and print this process's seconds of processor time until the imports and until the end."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    if kind == "panpipe":
        from panpipe.integrations.transformers import PanpipeTrainer as Trainer
    imported = time.process_time()
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
    )
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 65, (ROWS,), generator=draw).tolist()
    texts = [torch.randint(3, WORDS, (length,), generator=draw) for length in lengths]

    def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": ids[:, 0] % 2}

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, max_steps=steps, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_steps=steps, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=texts, data_collator=collate)
    trainer.train()
    if kind == "panpipe":
        trainer.end()
    print(f"{imported:.2f} {time.process_time():.2f}", flush=True)


def seconds(kind: str, steps: int, cache: str) -> list[tuple[float, float]]:
    """Processor seconds of each process until its imports and until its end."""
    from panpipe.benchmarks.driver import free_port, rank_environment

    ranks, port = 2 if kind == "panpipe" else 1, free_port()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--as", kind, "--steps", str(steps), "--folder", folder],
                env={**COMPILED, "PANPIPE_CACHE": cache, **(rank_environment(rank, port) if ranks > 1 else {})},
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        lines = [process.communicate()[0].splitlines()[-1] for process in started]
    return [(float(first), float(last)) for first, last in map(str.split, lines)]


def main() -> None:
    if "--as" in sys.argv:
        given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        fine_tune(given["--as"], int(given["--steps"]), given["--folder"])
        return
    from panpipe.benchmarks.driver import argument_parser, report

    arguments = argument_parser(__doc__, steps=(20, "updates")).parse_args()
    with tempfile.TemporaryDirectory() as cache:
        compiles = "import panpipe.integrations.transformers, panpipe; panpipe.pipeline"
        subprocess.run([sys.executable, "-c", compiles], env=COMPILED, check=True)
        rows = []
        for name, kind in (("Trainer", "plain"), ("PanpipeTrainer", "panpipe"), ("the same again", "panpipe")):
            for rank, (imported, end) in enumerate(seconds(kind, arguments.steps, cache)):
                rows.append((name, str(rank), f"{imported:.1f}", f"{end - imported:.1f}", f"{end:.1f}"))
        plain = float(rows[0][-1])
        table = [(*row, f"{float(row[-1]) / plain:.2f}") for row in rows]
    header = ("trainer", "rank", "imports s", "the rest s", "all s", "of Trainer's")
    report(arguments.record, f"Processor seconds of {arguments.steps} steps", header, table)


if __name__ == "__main__":
    main()
