"""Trains models of the zoo one after another: ``worker.py RESULTS NAME...``, by threads, or under torchrun by ranks.

Lines of JSON go to RESULTS, or each rank's to RESULTS and its number: one when a model begins, and one for every check.
"""

import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import panpipe
import torch
from attrs import frozen
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.laws.grouped import grouped
from tests.laws.zoo.entry import Entry
from tests.laws.zoo.models import ZOO

RANK = os.environ.get("RANK")
ROWS, MICROBATCHES, STEPS, SEED = 6, 3, 2, 3
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-2)
THREADS: tuple[dict[str, Any], ...] = ({}, {"schedule": "v-half"}, {"schedule": "1f1b", "max_chunks": 1, "mesh": 3})
RANKS: tuple[dict[str, Any], ...] = (
    {},
    {"schedule": "v-half"},
    {"schedule": "gpipe", "recompute": "all"},
)
"""Options of the checks; the first has those of the default call."""
TOLERANCES = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-4, 1e-5)}
"""Largest distances of losses, parameters and buffers; of gradients."""
SMALLEST_SHARE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""The least norm that a gradient's distance is divided by, as a share of the norm of all gradients: some gradients are
zero except for rounding, such as that of a bias before a normalisation."""
Result = dict[str, object]


@frozen
class Trained:
    """A model after `STEPS` steps, as far as this process holds it.

    Args:
        losses: of each step.
        gradients: of each step.
        parameters, buffers: at the end.
        schedule: of the plan, with the number of its devices; "" of one process.
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    schedule: str = ""


def held(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of what is on this process."""
    return {name: tensor.detach().clone() for name, tensor in named if not tensor.is_meta}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return held((name, p.grad) for name, p in model.named_parameters() if not p.is_meta and p.grad is not None)


def made(entry: Entry, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return entry.make().train().to(dtype)


def alone(entry: Entry, batch: Any, dtype: torch.dtype) -> Trained:
    """Trained by untouched PyTorch, with the random numbers of a pipeline."""
    model, losses, found = made(entry, dtype), list[float](), list[dict[str, Tensor]]()
    optimizer = OPTIMIZER(model.parameters())
    for index in range(STEPS):
        loss = panpipe.reference_step(model, entry.step, batch, microbatches=MICROBATCHES, seed=SEED, index=index)
        losses.append(loss.item())
        found.append(gradients(model))
        optimizer.step()
    return Trained(losses, found, held(model.named_parameters()), held(model.named_buffers()))


def as_pipeline(entry: Entry, batch: Any, dtype: torch.dtype, options: Mapping[str, Any]) -> Trained:
    """Trained as a pipeline, with other options than those of the default call."""
    model, losses, found = made(entry, dtype), list[float](), list[dict[str, Tensor]]()
    with panpipe.pipeline(
        model, entry.step, batch,
        **grouped(optimizer=OPTIMIZER, microbatches=MICROBATCHES, seed=SEED, progress=False, cache=False, **options),
    ) as pipe:  # fmt: skip
        for _ in range(STEPS):
            losses.append(pipe.step(batch).item())
            found.append(gradients(model))
        plan = pipe.plan
    of = (held(model.named_parameters()), held(model.named_buffers()))
    return Trained(losses, found, *of, f"{plan.schedule} on {plan.devices}")


def distances(found: Trained, wanted: Trained, share: float) -> dict[str, float]:
    """The largest ones; gradients relative in norm."""
    gradient = 0.0
    for mine, right in zip(found.gradients, wanted.gradients, strict=True):
        least = share * torch.stack([g.norm() for g in right.values()]).norm().item()
        for name in right.keys() & found.parameters:
            far = right[name].norm().item() if name not in mine else (mine[name] - right[name]).norm().item()
            gradient = worse(gradient, far / max(right[name].norm().item(), least, 1e-300))
    return {
        "loss": functools.reduce(worse, map(lambda a, b: abs(a - b), found.losses, wanted.losses), 0.0),
        "gradient": gradient,
        "parameter": functools.reduce(worse, apart(found.parameters, wanted.parameters), 0.0),
        "buffer": functools.reduce(worse, apart(found.buffers, wanted.buffers), 0.0),
    }


def worse(one: float, other: float) -> float:
    """The larger distance; what is no number is infinitely far."""
    return max(one, other if other == other else float("inf"))  # noqa: PLR0124


def apart(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[float]:
    for name in found.keys() & wanted.keys():
        mine, right = found[name].double(), wanted[name].double()
        yield (mine - right).abs().max().item() if mine.numel() and mine.shape == right.shape else 0.0


def check_by_all_plans(name: str, write: Callable[..., None]) -> None:
    """Train a model by each plan, and write what every check found."""
    entry, backend = ZOO[name], "threads" if RANK is None else "gloo"
    dtype = torch.float64 if entry.float64 else torch.float32
    batch, wanted = in_dtype(entry.batch(ROWS), dtype), None
    near, gradients_near = TOLERANCES[dtype]
    for options in THREADS if RANK is None else RANKS:
        result: Result = {"backend": backend, "dtype": str(dtype).removeprefix("torch."), "problem": ""}
        start = time.perf_counter()
        try:
            found = as_pipeline(entry, batch, dtype, options)
            wanted = wanted or alone(entry, batch, dtype)
            far = distances(found, wanted, SMALLEST_SHARE[dtype])
            close = max(far["loss"], far["parameter"], far["buffer"]) <= near and far["gradient"] <= gradients_near
            outcome = "right" if close and not entry.refusal else "wrong"
            result |= {**far, "schedule": found.schedule, "outcome": outcome}
        except panpipe.PanpipeError as error:
            expected = entry.refusal and entry.refusal in str(error)
            result |= {"outcome": "refused" if expected else "crashed", "problem": str(error)[:300]}
        except Exception as error:
            result |= {"outcome": "crashed", "problem": f"{type(error).__name__}: {error}"[:300]}
        write(**result, seconds=time.perf_counter() - start)
        if result["outcome"] == "refused":
            return


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """A batch whose floating-point tensors have another type."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return type(batch)({key: in_dtype(value, dtype) for key, value in batch.items()})
    if isinstance(batch, tuple | list):
        items = [in_dtype(value, dtype) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results, *names = sys.argv[1:]
    with Path(results + (RANK or "")).open("a", encoding="utf-8") as file:
        for name in names:
            print(json.dumps({"begins": name}), file=file, flush=True)

            def write(name: str = name, **result: object) -> None:
                print(json.dumps({"model": name, **result}), file=file, flush=True)

            check_by_all_plans(name, write)


if __name__ == "__main__":
    main()
