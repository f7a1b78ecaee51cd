"""Train a case as a pipeline and in one process, and compute the distance between them: on threads and on ranks."""

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import panpipe
import torch
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.diagnose.parity import reference_of_replicas
from panpipe.runtimes.engine.workers import Clock
from panpipe.runtimes.launch.team import Team
from panpipe.runtimes.offload.tier import OffloadTier
from panpipe.runtimes.programs.stage_compiler import StageCompiler
from panpipe.runtimes.update.optimizers import OptimizerFactory
from panpipe.runtimes.weights.remote_tensors import RemoteTensor
from torch.utils import _pytree as pytree

from .cuts import batch_on
from .models import BY_NAME, CASES, Case
from .ranks.teams import SEED, pipeline_on

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


def build(
    team: Team, name: str, dtype: torch.dtype, rows: int, plan: Plan | None, microbatches: int, device: str = "cpu",
    clock: Clock | None = None, compiler: StageCompiler | None = None, offload: OffloadTier | None = None, **options,
):  # fmt: skip
    """A pipeline for a case, with an even plan unless one is given."""
    return pipeline_on(
        team, BY_NAME[name], rows, microbatches, OPTIMIZER, dtype=dtype, device=device, plan=plan, plan_options=options,
        clock=clock, compiler=compiler, offload=offload,
    )  # fmt: skip


def batches(case: Case, replicas: int, rows: list[int], dtype: torch.dtype = torch.float64) -> list[Any]:
    """A batch for each replica, cut from one."""
    whole = case.batch(sum(rows[:replicas]), dtype)
    leaves, spec = pytree.tree_flatten(whole)
    parts = zip(*(torch.split(leaf, rows[:replicas]) for leaf in leaves), strict=True)
    return [pytree.tree_unflatten(list(part), spec) for part in parts]


class Trained:
    """A pipeline, over replicas if the team has them, and one process to compare it with.

    Args:
        team: the devices.
        case: what is trained.
        rows: samples of a replica's batch in the plan.
        microbatches: into how many they are cut.
        dtype, device: of the parameters.
        stray: another seed of the model's parameters on every replica but the first, which must not matter.
        shard: what replicas share; then no parameter keeps a gradient.
        plan: of the pipeline, with what replicas share; an even one by default.
        programs: options of ``ProgramOptions``.
        optimizer: of the pipeline and of the one process.
        options: of the even plan.
    """

    def __init__(
        self, team: Team, case: Case | str, rows: int, microbatches: int, *, dtype: torch.dtype = torch.float64,
        device: str = "cpu", stray: bool = False, shard: str = "none", plan: Plan | None = None,
        programs: dict[str, Any] | None = None, optimizer: OptimizerFactory = OPTIMIZER, **options: Any,
    ):  # fmt: skip
        self.team, self.microbatches, self.shard = team, microbatches, shard
        self.case = case = CASES[case] if isinstance(case, str) else case
        self.alone = copy.deepcopy(case.model(dtype).to(device))
        model = case.model(dtype).to(device)
        if stray and team.replica > 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        self.pipe = pipeline_on(
            team, case, rows, microbatches, optimizer, dtype=dtype, device=device, model=model, plan=plan,
            plan_options=options, shard=shard if plan is None else "none", **(programs or {}),
        )  # fmt: skip
        self.optimizer = optimizer(self.alone.named_parameters())
        self._least = 1e-12 if dtype is torch.float64 else 1e-6

    def step(self, rows: list[int]) -> dict[str, float]:
        """One step on batches of these numbers of rows."""
        return self.step_on(batches(self.case, self.team.replicas, rows))

    def distance(self, given: Sequence[Any]) -> float:
        """Steps on some batches; how far losses, parameters and buffers here are apart at most, NaN if one is."""
        found = [self.step_on([batch] * self.team.replicas) for batch in given]
        return largest(each[name] for each in found for name in ("loss", "parameter", "buffer"))

    def step_on(self, parts: list[Any]) -> dict[str, float]:
        """One step on a batch for each replica; the largest distances, gradients relative in norm."""
        index = self.pipe.metrics.steps
        loss = self.pipe.step(parts[self.team.replica]).item()
        wanted = reference_of_replicas(
            self.alone, self.case.step, parts, microbatches=self.microbatches, seed=SEED, index=index
        ).item()
        mine = dict(self.pipe._session.model.named_parameters())
        here = {name: p for name, p in self.alone.named_parameters() if not mine[name].is_meta}
        gradients, apart = [0.0], [0.0]
        for name, parameter in here.items():
            if self.shard == "parameters":
                assert isinstance(mine[name], RemoteTensor)
            elif self.shard != "none" or parameter.grad is None:
                assert mine[name].grad is None
            else:
                far = (mine[name].grad - parameter.grad).norm() / parameter.grad.norm().clamp_min(self._least)
                gradients.append(far.item())
        self.optimizer.step()
        with panpipe.weights.whole_parameters(self.pipe):
            apart += [(mine[name] - parameter).abs().max().item() for name, parameter in here.items()]
        buffers = dict(self.pipe._session.model.named_buffers())
        changed = [(buffers[n] - b).abs().max().item() for n, b in self.alone.named_buffers() if not buffers[n].is_meta]
        found = {"loss": [abs(loss - wanted)], "gradient": gradients, "parameter": apart, "buffer": [0.0, *changed]}
        return {name: largest(values) for name, values in found.items()}

    def bits(self) -> dict[str, list[float]]:
        """All parameters and gradients here, to compare replicas bit by bit."""
        found = {}
        with panpipe.weights.whole_parameters(self.pipe):
            for name, parameter in self.pipe._session.model.named_parameters():
                if not parameter.is_meta:
                    found[name] = parameter.detach().flatten().tolist()
                    if parameter.grad is not None:
                        found[f"gradient of {name}"] = parameter.grad.flatten().tolist()
        return found


def distance(
    team: Team, name: str, dtype: torch.dtype, rows: int, microbatches: int, device: str = "cpu",
    programs: dict[str, Any] | None = None, **options: Any,
) -> dict[str, float]:  # fmt: skip
    """The largest distances over three steps, of gradients at the first, of what this process owns."""
    case = BY_NAME[name]
    trained = Trained(team, case, rows, microbatches, dtype=dtype, device=device, programs=programs, **options)
    found = [trained.step_on([batch_on(case, rows, dtype, device)] * team.replicas) for _ in range(STEPS)]
    return {key: largest(each[key] for each in found) for key in found[0]} | {"gradient": found[0]["gradient"]}


def assert_equal(found: dict[str, float], gradient: float = 1e-12) -> None:
    """Assert that distances in float64 are rounding."""
    assert largest((found["loss"], found["gradient"])) < gradient, found
    assert largest((found["parameter"], found["buffer"])) < 1e-9, found


def largest(values: Iterable[float]) -> float:
    """The largest of some distances, 0 without any; NaN if one is, which ``max`` would pass over."""
    return float(torch.tensor([0.0, *values], dtype=torch.float64).max())
