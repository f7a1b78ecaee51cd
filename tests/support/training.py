"""Training with common features, compared with one process that uses torch's functions for each of them."""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import attrs
import panpipe
import torch
from attrs import evolve
from panpipe.runtimes.launch.team import Team, ThreadTeam
from panpipe.runtimes.update.training import Training
from torch import nn

from ..laws.grouped import grouped
from .cuts import captured_once, even_plan
from .models import Case
from .ranks.teams import SEED, pipeline_on

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def pipeline_of(
    case: Case,
    rows: int,
    microbatches: int,
    devices: int = 2,
    dtype: torch.dtype = torch.float32,
    *,
    plan_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[panpipe.Pipeline, nn.Module]:
    """A pipeline of threads by an even plan, and a copy of its model for one process.

    Where the options are those of training alone, pipelines of the same case share its capture.
    """
    model = case.model(dtype)
    alone = copy.deepcopy(model)
    optimizer = options.pop("optimizer", None)
    if all(name in attrs.fields_dict(Training) for name in options):
        training = Training(**options)
        pipe = pipeline_on(
            ThreadTeam(devices), case, rows, microbatches, optimizer, dtype=dtype, plan_options=plan_options,
            model=model, training=training,
        )  # fmt: skip
        return pipe, alone
    plan = even_plan(captured_once(case, dtype, rows, microbatches), devices, microbatches, **(plan_options or {}))
    options["optimizer"] = optimizer
    if "simulated" in options:
        options |= {"backend": "simulator", "devices": options.pop("simulated")}
    return panpipe.pipeline(
        model, case.step, case.batch(rows, dtype), **grouped(plan=plan, seed=SEED, **options)
    ), alone


def on_team(team: Team, case: Case, training: Training, shard: str = "none") -> tuple[panpipe.Pipeline, nn.Module]:
    """The same of 8 rows in 4 microbatches on devices that are there already, with SGD."""
    model = case.model(torch.float32)
    alone = copy.deepcopy(model)
    return pipeline_on(team, case, 8, 4, SGD, model=model, training=training, shard=shard), alone


def case_of(make: Callable[[], nn.Module], step: Callable[..., Any], batch: Callable[..., Any]) -> Case:
    """A case whose model is initialised with a fixed seed."""

    def build(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return make().to(dtype).train()

    return Case(build, step, batch)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of the parameters that this process holds and that have one."""
    held = {name: p for name, p in model.named_parameters() if not p.is_meta}
    return {name: p.grad.clone() for name, p in held.items() if p.grad is not None}


def unequal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not the same to the last bit in both."""
    names = {*first, *second}
    return sorted(n for n in names if n not in first or n not in second or not torch.equal(first[n], second[n]))


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that this process holds."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}


def state_bits(pipe: panpipe.Pipeline, average: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """Checksums of its state's tensors, of an average, too, and the text of what is no tensor."""
    state = pipe.state_dict()
    entries = {**state["model"], **{f"optimizer {key}": value for key, value in state["optimizer"].items()}}
    entries |= {f"average {key}": value for key, value in (average or {}).items()}
    return {
        key: crc32(value.detach().contiguous().numpy().tobytes()) if isinstance(value, torch.Tensor) else repr(value)
        for key, value in entries.items()
    }


def under_autocast(case: Case, dtype: torch.dtype) -> Case:
    """The case with its step under autocast."""

    def step(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return case.step(model, batch)

    return evolve(case, step=step)
