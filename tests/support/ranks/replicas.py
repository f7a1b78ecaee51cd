"""Train cases over replicas of a pipeline, and in one process on all their batches; see `ranks`."""

import copy
from typing import Any

import panpipe
import torch
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.diagnose.parity import reference_of_replicas
from panpipe.runtimes.launch.team import Team
from panpipe.runtimes.weights.remote_tensors import RemoteTensor
from torch.utils import _pytree as pytree

from ..models import Case
from ..parity import OPTIMIZER
from .teams import SEED, pipeline_on


def batches(case: Case, replicas: int, rows: list[int], dtype: torch.dtype = torch.float64) -> list[Any]:
    """A batch for each replica, cut from one."""
    whole = case.batch(sum(rows[:replicas]), dtype)
    leaves, spec = pytree.tree_flatten(whole)
    parts = zip(*(torch.split(leaf, rows[:replicas]) for leaf in leaves), strict=True)
    return [pytree.tree_unflatten(list(part), spec) for part in parts]


class Trained:
    """A pipeline over replicas, and one process to compare it with.

    Args:
        team: the ranks.
        case: what is trained.
        rows: samples of a replica's batch in the plan.
        microbatches: into how many they are cut.
        stray: another seed of the model's parameters on every replica but the first, which must not matter.
        shard: what replicas share; then no parameter keeps a gradient.
        plan: of the pipeline, with what replicas share; an even one by default.
    """

    def __init__(
        self, team: Team, case: Case, rows: int, microbatches: int, stray: bool = False, shard: str = "none",
        plan: Plan | None = None,
    ):  # fmt: skip
        self.team, self.case, self.microbatches, self.shard = team, case, microbatches, shard
        self.alone = copy.deepcopy(case.model(torch.float64))
        model = case.model(torch.float64)
        if stray and team.replica > 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        self.pipe = pipeline_on(
            team,
            case,
            rows,
            microbatches,
            OPTIMIZER,
            dtype=torch.float64,
            model=model,
            plan=plan,
            shard=shard if plan is None else "none",
        )
        self.optimizer = OPTIMIZER(self.alone.named_parameters())

    def step(self, rows: list[int]) -> dict[str, float]:
        """One step on batches of these numbers of rows."""
        return self.step_on(batches(self.case, self.team.replicas, rows))

    def step_on(self, parts: list[Any]) -> dict[str, float]:
        """One step on a batch for each replica; the largest distances, gradients relative in norm."""
        index = self.pipe.metrics.steps
        loss = self.pipe.step(parts[self.team.replica]).item()
        wanted = reference_of_replicas(
            self.alone, self.case.step, parts, microbatches=self.microbatches, seed=SEED, index=index
        ).item()
        found = {"loss": abs(loss - wanted), "gradient": 0.0, "parameter": 0.0, "buffer": 0.0}
        mine = dict(self.pipe._session.model.named_parameters())
        here = {name: p for name, p in self.alone.named_parameters() if not mine[name].is_meta}
        for name, parameter in here.items():
            assert (parameter.grad is not None) == parameter.requires_grad
            if self.shard == "parameters":
                assert isinstance(mine[name], RemoteTensor)
                continue
            if self.shard != "none" or parameter.grad is None:
                assert mine[name].grad is None
                continue
            assert mine[name].grad is not None
            far = (mine[name].grad - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-12)
            found["gradient"] = max(found["gradient"], far.item())
        self.optimizer.step()
        with panpipe.weights.whole_parameters(self.pipe):
            for name, parameter in here.items():
                found["parameter"] = max(found["parameter"], (mine[name] - parameter).abs().max().item())
        buffers = dict(self.pipe._session.model.named_buffers())
        for name, buffer in self.alone.named_buffers():
            if not buffers[name].is_meta:
                found["buffer"] = max(found["buffer"], (buffers[name] - buffer).abs().max().item())
        return found

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
