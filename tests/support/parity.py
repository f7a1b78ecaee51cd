"""Train a case as a pipeline and in one process, and compute the distance between them."""

import copy
import functools

import torch
from attrs import frozen
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.diagnose.parity import reference_step
from panpipe.runtimes.engine.workers import Clock
from panpipe.runtimes.launch.team import Team
from panpipe.runtimes.offload.tier import OffloadTier
from panpipe.runtimes.programs.stage_compiler import StageCompiler

from .cuts import batch_on
from .models import BY_NAME
from .ranks.teams import pipeline_on

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-2)
STEPS = 3
PLANS = {
    "1f1b": {},
    "interleaved": {"schedule_name": "interleaved-1f1b", "chunks": 2},
    "split backward": {"split": True},
    "early gradients": {"early": 2},
    "v-half": {"schedule_name": "v-half", "chunks": 2},
    "recompute": {"recompute": None},
    "recompute in a v": {"schedule_name": "zb-v", "chunks": 2, "recompute": (0, 3)},
    "gpipe": {"schedule_name": "gpipe"},
    "looped": {"schedule_name": "looped", "chunks": 2},
    **{name: {"schedule_name": name} for name in ("zb-h1", "zb-h2", "zb-1p", "zb-2p")},
    **{
        name: {"schedule_name": name, "chunks": 2} for name in ("zb-v", "v-min", "1f1b-v", "gis", "gis-h", "dualpipe-v")
    },
}
"""Options of even plans: every named schedule, and two whose backwards are split afterwards."""
EVERYWHERE = ("1f1b", "interleaved", "split backward", "v-half", "recompute in a v")
"""Plans that differ most: one stage a device and two, both placements of two, halves of backwards, and recompute."""
SOME = ("interleaved", "v-half")


@frozen
class Distance:
    """The largest distances after a few optimizer steps; gradients relative, in norm, at the first step."""

    loss: float
    gradient: float
    parameter: float
    buffer: float


def build(
    team: Team, name: str, dtype: torch.dtype, rows: int, plan: Plan | None, microbatches: int, device: str = "cpu",
    clock: Clock | None = None, compiler: StageCompiler | None = None, offload: OffloadTier | None = None, **options,
):  # fmt: skip
    """A pipeline for a case, with an even plan unless one is given."""
    return pipeline_on(
        team, BY_NAME[name], rows, microbatches, OPTIMIZER, dtype=dtype, device=device, plan=plan, plan_options=options,
        clock=clock, compiler=compiler, offload=offload,
    )  # fmt: skip


def distance(
    team: Team, name: str, dtype: torch.dtype, rows: int, microbatches: int, device: str = "cpu", **options
) -> Distance:
    """Train both for three steps. Only what this process owns is compared."""
    case = BY_NAME[name]
    pipe = build(team, name, dtype, rows, None, microbatches, device, **options)
    alone = copy.deepcopy(case.model(dtype).to(device))
    optimizer = OPTIMIZER(alone.named_parameters())
    mine = dict(pipe._session.model.named_parameters())
    batch = batch_on(case, rows, dtype, device)
    loss = gradient = 0.0
    for index in range(STEPS):
        found = pipe.step(batch).item()
        wanted = reference_step(alone, case.step, batch, microbatches=microbatches, seed=3, index=index).item()
        loss = max(loss, abs(found - wanted))
        if index == 0:
            for key, parameter in alone.named_parameters():
                if not mine[key].is_meta:
                    scale = max(parameter.grad.norm().item(), 1e-6)
                    gradient = max(gradient, (mine[key].grad - parameter.grad).norm().item() / scale)
        optimizer.step()
    parameter = max(
        ((mine[k] - p).abs().max().item() for k, p in alone.named_parameters() if not mine[k].is_meta), default=0.0
    )
    buffers = dict(pipe._session.model.named_buffers())
    buffer = max(
        ((buffers[k] - b).abs().max().item() for k, b in alone.named_buffers() if not buffers[k].is_meta), default=0.0
    )
    return Distance(loss, gradient, parameter, buffer)
