"""Fine-tune a causal language model with transformers' Trainer, as a pipeline.

    python examples/trainer.py
    torchrun --nproc-per-node 2 examples/trainer.py

Trainer's arguments, logs, checkpoints and callbacks are as usual; the only change is ``PanpipeTrainer`` in place of
``Trainer``. Weights are random and the text is this file's, so nothing is downloaded.
"""

import argparse
from pathlib import Path

import panpipe
import torch
from panpipe.integrations.transformers import PanpipeTrainer
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

SEQUENCE, ROWS = 64, 256


def text() -> list[dict[str, torch.Tensor]]:
    """Samples of bytes; the first quarter of each second one is a prompt, without a loss."""
    data = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - SEQUENCE, (ROWS,), generator=torch.Generator().manual_seed(0))
    samples = []
    for number, start in enumerate(starts.tolist()):
        ids = data[start : start + SEQUENCE]
        labels = ids.clone()
        labels[: SEQUENCE // 4 * (number % 2)] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/trainer", help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=SEQUENCE, n_embd=64, n_layer=4, n_head=4)
    samples = text()
    trainer = PanpipeTrainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            arguments.out, per_device_train_batch_size=16, per_device_eval_batch_size=16, max_steps=arguments.steps,
            learning_rate=1e-3, logging_steps=5, eval_strategy="steps", eval_steps=10, save_steps=10, use_cpu=True,
            report_to="none",
        ),
        train_dataset=samples[: -ROWS // 4],
        eval_dataset=samples[-ROWS // 4 :],
        pipeline={"microbatches": 4, "plan": "1f1b", "run": panpipe.Run(progress=False)},
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=arguments.resume)
    trainer.save_model()  # every rank; GPT2LMHeadModel.from_pretrained reads it
    trainer.end()


if __name__ == "__main__":
    main()
