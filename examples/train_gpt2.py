"""Train a byte-level GPT-2 on the source of Python's standard library, as a pipeline over the ranks of ``torchrun``.

    torchrun --nproc-per-node 2 examples/train_gpt2.py --out out/demo

The model is transformers' `GPT2LMHeadModel`, unchanged, with random weights; the text is what every machine that runs
Python has. The plan is chosen automatically from measurements. At the end: the loss, predicted against measured step
time and memory, a check against one process, two Perfetto traces and one HTML page.
"""

import argparse
import copy
import functools
import os
import statistics
import sysconfig
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import GPT2Config, GPT2LMHeadModel

import panpipe

SEQUENCE = 128
MICROBATCHES = 8
ROWS = 32


def standard_library_text(limit: int = 4_000_000) -> torch.Tensor:
    """Bytes of the standard library's own source, in the order of its file names; int64, shape (bytes,)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long()


def batches(text: torch.Tensor, count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Random windows of the text: inputs and the bytes that follow them; each of shape (ROWS, SEQUENCE)."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        starts = torch.randint(0, len(text) - SEQUENCE - 1, (ROWS,), generator=generator)
        windows = torch.stack([text[s : s + SEQUENCE + 1] for s in starts.tolist()])
        result.append({"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()})
    return result


def make_model(seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 of four layers over bytes, with dropout, and input and output embeddings tied as GPT-2 has them."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256, n_positions=SEQUENCE, n_embd=256, n_layer=6, n_head=8, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def step(model: GPT2LMHeadModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """An ordinary training step: the loss of predicting each next byte."""
    logits = model(input_ids=batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def factory() -> tuple[GPT2LMHeadModel, object, dict[str, torch.Tensor]]:
    """For ``panpipe plan --model``: model, step and an example batch."""
    return make_model(), step, batches(standard_library_text(), 1)[0]
