"""A pipeline that is captured for all sizes, and one that is captured for each size: equal bits after every call."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import panpipe
import pytest
import torch
from attrs import define, evolve
from torch import Tensor
from torch.utils import _pytree as pytree

from ...laws.grouped import grouped
from .models import Case

MICROBATCHES = 2
STEP, ACCUMULATE, EVALUATE, CHECKPOINT, RESUME = CALLS = "step", "accumulate", "evaluate", "checkpoint", "resume"
Walk = Sequence[tuple[str, int]]
"""Calls of a pipeline, each with the size of its batch."""


def built(case: Case, size: int, **options: Any) -> panpipe.Pipeline:
    """A pipeline of two devices whose example has this size."""
    return panpipe.pipeline(
        case.model(), case.step, case.batch(size),
        **grouped(
            optimizer=torch.optim.AdamW, microbatches=MICROBATCHES, progress=False,
            **(options if "plan" in options else {"contest": False, "cache": False, **options}),
        ),
    )  # fmt: skip


@define
class Captures:
    """The number of calls of torch's export."""

    count: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count those within this context."""
        export = torch.export.export

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return export(*args, **kwargs)

        with mock.patch.object(torch.export, "export", counting):
            yield


def size_by_size(case: Case) -> Case:
    """The same, captured for each size: its batches have a text that differs, for which no capture serves others."""
    step = case.step
    return evolve(
        case, step=lambda model, batch: step(model, batch["own"]),
        batch=lambda size: {"own": case.batch(size), "size": str(size)},
    )  # fmt: skip


def random_walk(case: Case, seed: int, calls: Sequence[str] = CALLS, count: int = 10) -> list[tuple[str, int]]:
    """Random calls with batches of random sizes, which begin and end with steps."""
    draw = random.Random(seed)
    kinds = [STEP, *(draw.choice([STEP, *calls]) for _ in range(count)), STEP]
    return [(kind, draw.randint(case.sizes[0], case.sizes[-1])) for kind in kinds]


def check_walk(case: Case, walk: Walk, folder: Path, *, ahead: int = 0, **options: Any) -> None:
    """Both pipelines return the same bits in every call, and have the same state after every update.

    The first one takes two captures for training, and two for evaluation.

    Args:
        case: the model and its batches.
        walk: the calls.
        folder: for checkpoints; the same one on all ranks.
        ahead: what the sizes of this process are larger by, for replicas with batches of their own.
        options: of ``panpipe.pipeline``.
    """
    captures, saved, waiting = Captures(), "", False
    with captures.counted():
        pipe = built(case, case.sizes[0], **options)
    own = size_by_size(case)
    other = built(own, own.sizes[0], plan=pipe.plan)
    for number, (call, size) in enumerate(walk):
        if waiting and call in (CHECKPOINT, RESUME):
            continue  # refused while gradients wait for an update
        saved = str(number) if call == CHECKPOINT else saved
        with captures.counted():
            mine = _call(pipe, call, case.batch(size + ahead), folder / "all", saved)
        found = _call(other, call, own.batch(size + ahead), folder / "each", saved)
        assert _equal(mine, found), (number, call, size)
        waiting = call == ACCUMULATE or (waiting and call != STEP)
        if not waiting:
            assert _equal(pipe.state_dict(), other.state_dict()), (number, call, size)
    assert captures.count <= 2 * case.exports * (1 + any(call == EVALUATE for call, _ in walk)), captures.count
    for each in (pipe, other):
        each.close()


def _call(pipe: panpipe.Pipeline, call: str, batch: Any, folder: Path, saved: str) -> Any:
    if call == EVALUATE:
        return pipe.evaluate(batch)
    if call in (STEP, ACCUMULATE):
        return pipe.step(batch, update=call == STEP)
    if call == CHECKPOINT:
        pipe.checkpoint(folder / saved)
    elif saved:
        pipe.resume(folder / saved)
    return None


def _equal(one: Any, other: Any) -> bool:
    pairs = list(zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def check_peaks(case: Case, declared: Any) -> None:
    """Peaks stay within the plan for the largest declared sizes, and larger batches are refused with both numbers.

    Args:
        case: the model and its batches; its largest size is declared, and is too large for one fewer.
        declared: ``dynamic=``.
    """
    pipe = built(case, case.sizes[0], dynamic=declared)
    planned = panpipe.simulate(pipe.plan).peak_saved_bytes
    for size in case.sizes:
        _, trace = pipe.trace_step(case.batch(size))
        for device, most in enumerate(planned):
            held = max(s.bytes for s in trace.memory if s.device == device and s.kind == "saved")
            assert held <= 1.05 * most, (size, device)
            assert size < case.sizes[-1] or held >= 0.95 * most, device
    before = pipe.metrics.steps
    most = case.sizes[-1]
    with pytest.raises(panpipe.RequestError, match=f"has {most + 3} entries in dimension .* at most {most}"):
        pipe.step(case.batch(most + 3))
    assert pipe.metrics.steps == before
    pipe.step(case.batch(most))
    pipe.close()
