"""Processor seconds of set-up, and what a new size costs.

    python benchmarks/runtime/new_sizes.py [--lengths] [--record FILE]

The default call of `panpipe.pipeline` is timed for several models; `cProfile` shows what takes the time.

With ``--lengths`` the default call trains each model on 200 batches of 200 different sizes (a UNet of four), each twice
in a row: how many captures it takes, and how much longer the first step of a size is than the second one. Steps that
capture are counted apart. Meanwhile Python's garbage collector is watched.
"""

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import panpipe
import torch
from panpipe.benchmarks.driver import argument_parser, report
from panpipe.benchmarks.models import bert, classify, llama, resnet, t5
from panpipe.core.search.compiling import compile_ahead
from panpipe.tests.laws.zoo.vision import UNet
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

SMALL = {"width": 32, "layers": 2, "vocabulary": 64}
MODELS = {name: partial(make, **SMALL) for name, make in (("Llama", llama), ("BERT", bert), ("T5", t5))}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def gpt2() -> nn.Module:
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(use_cache=False))


def pipelines() -> Iterator[list[str]]:
    """The processor seconds of the default call for several models."""
    text = {name: torch.ones(8, 64, dtype=torch.int64) for name in ("input_ids", "labels")}
    labelled = {"x": torch.randn(8, 3, 32, 32), "y": torch.zeros(8, dtype=torch.int64)}
    simulated = {"backend": "simulator", "devices": "2xA100-40GB"}
    cases: list[tuple[str, Any, Any, Any, dict[str, Any]]] = [
        *((name, MODELS[name], step, text, {}) for name in ("Llama", "Llama", "BERT", "T5")),
        ("ResNet-18", resnet, classify, labelled, {}),
        ("UNet", UNet, segmented_step, pictures(32), {}),
        ("GPT-2 on meta", gpt2, step, text, simulated),
    ]
    compile_ahead(print)  # as after an installation by `make`: half a minute of a new checkout
    for number, (name, make, function, batch, options) in enumerate(cases):
        model, start = make(), time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = panpipe.pipeline(
                model, function, batch, optimizer=torch.optim.AdamW, microbatches=4, plan=panpipe.Auto(cache=False),
                run=panpipe.Run(progress=False, weights=getattr(model, "_init_weights", None)), **options,
            )  # fmt: skip
        if number:  # the first model loads torch
            yield [name, f"{time.process_time() - start:.2f}"]
        pipe.close()


SIZES = 200
"""Number of different lengths."""
ROWS = 8


def collated() -> Callable[[int], Any]:
    """Batches of masked texts, padded to the longest one, by transformers' collator."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "mask", "cls", "sep")}
    words = {word: number for number, word in enumerate([*special.values(), *(f"w{n}" for n in range(59))])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, special["unk_token"])), **special
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)

    def batch(size: int) -> Any:
        return dict(collator([{"input_ids": torch.randint(5, 64, (size - row,)).tolist()} for row in range(ROWS)]))

    return batch


def texts(size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (ROWS, size))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def translations(size: int) -> dict[str, torch.Tensor]:
    return {**texts(size), "labels": torch.randint(64, (ROWS, size // 2 + 2))}


def recurrent_step(model: nn.ModuleList, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    embed, recurrent, head = model
    return nn.functional.cross_entropy(head(recurrent(embed(batch["x"]))[0]).flatten(0, 1), batch["x"].flatten())


def recurrent() -> nn.Module:
    return nn.ModuleList([nn.Embedding(64, 32), nn.LSTM(32, 32, 2, batch_first=True), nn.Linear(32, 64)])


def segmented_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def pictures(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, 3, size, size), "y": torch.randint(10, (ROWS, size, size))}


def lengths() -> Iterator[list[str]]:
    """A row for each model."""
    order = torch.randperm(SIZES, generator=torch.Generator().manual_seed(0)).tolist()
    one_each = [16 + number for number in order]
    cases: list[tuple[str, Any, Any, Callable[[int], Any], list[int]]] = [
        ("LSTM", recurrent, recurrent_step, lambda size: {"x": torch.randint(64, (ROWS, size))}, one_each),
        ("Llama", MODELS["Llama"], step, texts, one_each),
        ("BERT, DataCollatorForLanguageModeling", MODELS["BERT"], step, collated(), one_each),
        ("T5", MODELS["T5"], step, translations, one_each),
        ("UNet, images of four sizes", UNet, segmented_step, pictures, [32, 48, 64, 40]),
    ]
    for name, make, function, batch, sizes in cases:
        yield of_lengths(name, make(), function, batch, sizes)


def of_lengths(
    name: str, model: nn.Module, function: Any, batch: Callable[[int], Any], sizes: Sequence[int]
) -> list[str]:
    """The row of a model: captures, seconds, and milliseconds of new sizes."""
    collections, export = [0.0], torch.export.export
    more, steps, seconds, begun = list[float](), list[float](), list[float](), 0.0

    def collecting(phase: str, info: dict[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.perf_counter()
        else:
            collections.append(time.perf_counter() - begun)

    with warnings.catch_warnings(), mock.patch.object(torch.export, "export", wraps=export) as capture:
        warnings.simplefilter("ignore")
        pipe = panpipe.pipeline(
            model, function, batch(sizes[0]), optimizer=torch.optim.AdamW, microbatches=4,
            plan=panpipe.Auto(contest=False, cache=False), run=panpipe.Run(progress=False),
        )  # fmt: skip
        gc.callbacks.append(collecting)
        for size in sizes:
            known, times = capture.call_count, list[float]()
            for _ in range(2):
                given, start = batch(size), time.perf_counter()
                pipe.step(given)
                times.append(time.perf_counter() - start)
            if capture.call_count > known or size == sizes[0]:
                seconds.append(times[0] - times[1])
                collections = [0.0]
            else:
                more.append(1e3 * (times[0] - times[1]))
            steps.append(1e3 * times[1])
        gc.callbacks.remove(collecting)
        pipe.close()
    more.sort()
    at = (statistics.median(more), more[int(0.9 * len(more))], more[-2], more[-1], 1e3 * max(collections))
    return [name, str(len(sizes)), str(capture.call_count), f"{max(seconds):.2f}", f"{statistics.median(steps):.1f}",
            *(f"{each:.1f}" for each in at)]  # fmt: skip


def main() -> None:
    arguments = argument_parser(__doc__, lengths=(False, "train on many sizes")).parse_args()
    torch.set_num_threads(1)
    if arguments.lengths:
        columns = ("model", "sizes", "captures", "second size, s", "step, ms", "more for a new size: median, ms")
        columns += ("90 %, ms", "second most, ms", "most, ms", "longest garbage collection, ms")
        report(arguments.record, "A new size in each of many steps", columns, list(lengths()))
    else:
        report(arguments.record, "Processor seconds of panpipe.pipeline", ["model", "all"], list(pipelines()))


if __name__ == "__main__":
    main()
