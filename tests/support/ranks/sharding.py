"""Ranks whose replicas share optimizers, compared with one process; see `ranks`."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import panpipe
import torch
from attrs import evolve
from panpipe.core.policies.sharding import LEVELS
from panpipe.runtimes.diagnose.parity import reference_of_replicas
from panpipe.runtimes.launch.team import Team
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.update.training import Training

from ..cuts import captured_once, even_plan
from ..models import CASES, Case
from ..parity import OPTIMIZER, PLANS, Trained, batches, largest
from ..programs.optimizing import two_groups, warm_up
from ..sharing import runs_of_all, shared
from ..training import case_of
from .scaling_ranks import refusal
from .teams import SEED, pipeline_on

F64 = torch.float64
NAME = "tied gpt with dropout"
SOME = ("interleaved", "recompute in a v")
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),  # has state from the start
    "groups": two_groups,
}


class Adapted(torch.nn.Module):
    """A frozen layer in 8-bit integers, a frozen bias, and a trained product of two small matrices beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        numbers = torch.randint(-9, 9, (width, width), dtype=torch.int8)
        self.base = torch.nn.Parameter(numbers, requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(width), requires_grad=False)
        self.down, self.up = torch.nn.Linear(width, 3, bias=False), torch.nn.Linear(3, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.base.to(x.dtype) / 50, self.bias) + self.up(self.down(x))


def _frozen_layers() -> torch.nn.Module:
    """Adapters on frozen layers, after a layer that is frozen whole; one weight needs a bucket of its own."""
    first = torch.nn.Linear(16, 560)
    first.requires_grad_(False)
    wide = torch.nn.Linear(560, 560)  # above 1 MiB
    wide.weight.requires_grad_(False)
    return torch.nn.Sequential(first, torch.nn.Tanh(), wide, Adapted(560), torch.nn.Tanh(), torch.nn.Linear(560, 8))


FROZEN = case_of(
    _frozen_layers,
    lambda model, batch: model(batch).square().mean(),
    lambda rows, dtype: torch.randn(rows, 16, dtype=dtype, generator=torch.Generator().manual_seed(1)),
)
"""Fine-tuning: of most parameters the replicas have no gradient."""


def of_frozen_parameters(team: Team) -> dict[str, Any]:
    """Distances from one process, and bytes of parameters between steps, by level."""
    found: dict[str, Any] = {}
    for level in ("none", "gradients", "parameters"):
        trained = Trained(team, FROZEN, 4, 2, stray=True, shard=level)
        far = largest(one for rows in ([4] * team.replicas, [4, 1, 3]) for one in trained.step(rows).values())
        found[level] = {"far": far, "held": _held_bytes(trained.pipe)[1]}
    return found


def of_unfrozen_parameters(team: Team, levels: Sequence[str]) -> dict[str, float]:
    """The largest distance from one process where parameters are unfrozen between steps, by level.

    One is in a bucket of its own, and two in buckets of several. An evaluation precedes the step that trains these.
    """
    found: dict[str, float] = {}
    for level in levels:
        trained, rows = Trained(team, FROZEN, 4, 2, stray=True, shard=level), [4] * team.replicas
        far = [largest(trained.step(rows).values())]
        for names in (["2.weight"], ["0.bias", "3.bias"]):
            for model in (trained.pipe._session.model, trained.alone):
                for name in names:
                    model.get_parameter(name).requires_grad_(True)
            if len(names) > 1:
                trained.pipe.evaluate(batches(FROZEN, team.replicas, rows)[team.replica])
            far += [largest(trained.step(each).values()) for each in (rows, [4, 1, 3])]
        state = copy.deepcopy(trained.pipe.state_dict())
        trained.step(rows)
        trained.pipe.load_state_dict(state)
        far.append(abs(trained.pipe.metrics.steps - 5))
        found[level] = largest(far)
    return found


def evaluations_by_stages(team: Team) -> dict[str, Any]:
    """Distances of evaluations from one process, where a device has the parameters of one stage whole at a time."""
    case = CASES[NAME]
    plan_options = PLANS["zb-v"]
    pipe = pipeline_on(team, case, 8, 4, OPTIMIZER, dtype=F64, plan_options=plan_options, shard="parameters")
    alone = case.model(F64).eval()
    average, found = panpipe.weights.ema(pipe, 1.0), dict[str, float]()
    pipe._session.model.eval()

    def far(what: str, rows: list[int]) -> None:
        parts = batches(case, team.replicas, rows)
        with torch.no_grad():
            losses = [case.step(alone, part) for part in parts]
        wanted = sum(loss * size for loss, size in zip(losses, rows, strict=False)) / sum(rows[: team.replicas])
        found[what] = abs(pipe.evaluate(parts[team.replica]).item() - wanted.item())

    far("whole batches", [8] * team.replicas)
    far("fewer microbatches of one replica", [8, 2, 1])
    with panpipe.weights.whole_parameters(pipe):
        far("whole parameters", [8] * team.replicas)
    part = batches(case, team.replicas, [8] * team.replicas)[team.replica]
    _, trace = pipe.trace_step(part, evaluate=True)
    pipe._session.model.train()
    pipe.step(part)
    pipe._session.model.eval()
    with average.applied():  # that of the beginning
        far("an average", [8] * team.replicas)
    kinds = ("UNSHARD", "RESHARD")
    here = [each for each in trace.events if each.device == team.rank_here and each.action.kind.value in kinds]
    return {"far": found, "actions": [str(each.action) for each in here]}


def every_case(team: Team, shard: str, cases: Mapping[str, Case] = CASES) -> dict[str, Any]:
    """Every case with batches of several sizes."""
    found: dict[str, Any] = {}
    rows = [[4] * team.replicas, [4, 1, 3], [3, 4, 1]]
    for name, case in cases.items():
        trained = Trained(team, case, 4, 2, stray=True, shard=shard)
        found[name] = {
            "distances": [trained.step(each) for each in rows],
            "bits": trained.bits(),
            "metrics": dict(trained.pipe.metrics),
        }
    return found


def every_optimizer(team: Team, shard: str) -> dict[str, float]:
    """The largest distance of a parameter after three updates of two batches each, with clipping, by optimizer."""
    case, found = CASES[NAME], {}
    for name, make in OPTIMIZERS.items():
        model = case.model(F64)
        alone = copy.deepcopy(model)
        stepped = make(alone.named_parameters())
        pipe = pipeline_on(
            team, case, 4, 2, make, dtype=F64, model=model, training=Training(clip_norm=0.05), shard=shard
        )
        parts = batches(case, team.replicas, [4] * team.replicas)
        far = 0.0
        for update in range(3):
            for kept in (False, True):
                pipe.step(parts[team.replica], update=kept)
            both: dict[str, torch.Tensor] = {}
            for index in (2 * update, 2 * update + 1):
                reference_of_replicas(alone, case.step, parts, microbatches=2, seed=SEED, index=index)
                for key, parameter in alone.named_parameters():
                    assert parameter.grad is not None
                    both[key] = both.get(key, torch.zeros_like(parameter)) + parameter.grad / 2
            for key, parameter in alone.named_parameters():
                parameter.grad = both[key]
            norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05).item()
            assert pipe.metrics.grad_norm is not None
            far = largest((far, abs(pipe.metrics.grad_norm - norm) / norm))
            stepped.step()
        found[name] = largest((far, _distance(pipe, alone)))
    return found


def resumed(team: Team, folder: Path) -> dict[str, Any]:
    """Checkpoints of all levels, resumed in each level or in one other, and what pipelines have after one more step."""
    case = CASES[NAME]
    parts = batches(case, team.replicas, [4] * team.replicas)

    def new(shard: str) -> Pipeline:
        pipe = pipeline_on(team, case, 4, 2, two_groups, dtype=F64, training=Training(scheduler=warm_up), shard=shard)
        panpipe.weights.ema(pipe, 0.9)
        return pipe

    def run(pipe: Pipeline, steps: int = 2) -> Pipeline:
        for _ in range(steps):
            pipe.step(parts[team.replica])
        return pipe

    pipes = {shard: run(new(shard)) for shard in LEVELS}
    held = {shard: _held_bytes(pipe) for shard, pipe in pipes.items()}
    states = {shard: copy.deepcopy(pipe.state_dict()) for shard, pipe in pipes.items()}
    for shard, pipe in pipes.items():
        pipe.checkpoint(folder / shard)
        run(pipe, 1)
    wanted, far = pipes["none"], dict[str, float]()
    for shard in LEVELS[1:]:
        far[f"state of {shard}"] = _state_distance(states["none"], states[shard])
        far[f"trained with {shard}"] = _distance(pipes[shard], wanted._session.model)
    for source, target in zip(LEVELS, reversed(LEVELS), strict=True):
        pipe = new(target)
        pipe.resume(folder / source)
        run(pipe, 1)
        far[f"{source} to {target}"] = _distance(pipe, wanted._session.model)
        far[f"{source} to {target}, average"] = _average_distance(pipe, wanted)
    for shard in LEVELS[1:]:
        twin = new(shard)
        twin.load_state_dict(states[shard])
        far[f"in memory with {shard}"] = _distance(run(twin, 1), wanted._session.model)
    loss = [pipe.evaluate(parts[team.replica]).item() for pipe in pipes.values()]
    most = max(p.nbytes for own in wanted._session.stage_parameters.values() for p in own.values())
    return {"held": held, "largest": most, "far": far, "evaluated": max(loss) - min(loss)}


def _held_bytes(pipe: Pipeline) -> list[int]:
    """Bytes of optimizer state here, without counters; of parameters between steps; and of gradients."""
    states = [state for optimizer in pipe.optimizers.values() for state in optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if value.ndim]
    with torch._C.DisableTorchFunctionSubclass():  # those that replicas share refuse uses between steps
        own = [p.untyped_storage().nbytes() for held in pipe._session.stage_parameters.values() for p in held.values()]
    shared = [state.shared for state in pipe._trainer.stages.states.values()]
    own += [bucket.values.nbytes for each in shared if each is not None for bucket in each.buckets]
    gradients = [buffer for state in pipe._trainer.stages.states.values() for buffer in state.gradient_buffers]
    return [sum(t.untyped_storage().nbytes() for t in tensors), sum(own), sum(buffer.nbytes for buffer in gradients)]


def _state_distance(first: dict[str, Any], second: dict[str, Any]) -> float:
    assert first["optimizer"].keys() == second["optimizer"].keys()
    assert first["stepped"] == second["stepped"]
    far = 0.0
    for name, value in first["optimizer"].items():
        other = second["optimizer"][name]
        if isinstance(value, torch.Tensor):
            assert (value.shape, value.dtype) == (other.shape, other.dtype), name
            far = largest((far, (value - other).abs().max().item()))
        else:
            assert value == other, name
    return far


def _distance(pipe: Pipeline, alone: torch.nn.Module) -> float:
    """The largest distance of a parameter here from that of a model, or of another pipeline's model."""
    wanted = dict(alone.named_parameters())
    with panpipe.weights.whole_parameters(pipe):
        here = {name: p for name, p in pipe._session.model.named_parameters() if not p.is_meta}
        return largest((p - wanted[name]).abs().max().item() for name, p in here.items())


def _average_distance(pipe: Pipeline, other: Pipeline) -> float:
    mine, theirs = (each._trainer.averages.all[0].tensors for each in (pipe, other))
    return largest((value - theirs[name]).abs().max().item() for name, value in mine.items())


def scheduled(team: Team, names: Sequence[str]) -> dict[str, list[float]]:
    """Schedules with a split backward and several stages on a device, with fewer microbatches in some batches."""
    case, found = CASES[NAME], {}
    for number, name in enumerate(names):
        plan = even_plan(captured_once(case, F64, 8, 4, "cpu"), team.size, 4, **PLANS[name])
        for level, room in (("gradients", True), ("parameters", number % 2 == 1)):
            wanted = shared(evolve(plan, mesh=team.mesh), level, room=room)
            trained = Trained(team, case, 8, 4, shard=level, plan=wanted)
            rows = ([8, 2, 1], [1, 5, 8], [8] * team.replicas)
            found[f"{name}, {level}, {room}"] = [largest(trained.step(each).values()) for each in rows]
    return found


def cleared(team: Team, shard: str) -> dict[str, str]:
    """What is said where the user clears, reads or replaces gradients that wait for an update."""
    case, found = CASES[NAME], {}
    pipe = pipeline_on(team, case, 4, 2, OPTIMIZER, dtype=F64, shard=shard)
    part = batches(case, team.replicas, [4] * team.replicas)[team.replica]
    own = [p for parameters in pipe._session.stage_parameters.values() for p in parameters.values()]

    def slices() -> list[torch.nn.Parameter]:
        groups = [group for optimizer in pipe.optimizers.values() for group in optimizer.param_groups]
        return [p for group in groups for p in group["params"]]

    def assign() -> None:
        own[0].grad = torch.zeros_like(own[0])

    uses = {
        "zero_grad": lambda: [optimizer.zero_grad() for optimizer in pipe.optimizers.values()],
        "to zero": lambda: pipe._session.model.zero_grad(set_to_none=False),
        "slices' norm": lambda: torch.nn.utils.get_total_norm([p.grad for p in slices() if p.grad is not None]),
        "nothing": lambda: None,
    }
    if shard in ("gradients", "parameters"):
        uses |= {
            "norm": lambda: torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None]),
            "assigned": assign,
        }
    for name, use in uses.items():
        pipe.step(part, update=False)
        found[name] = refusal(use)
        if found[name] == "nothing":
            found[name] = refusal(lambda: pipe.step(part))
    return found


def partly(team: Team, shard: str) -> dict[str, Any]:
    """A plan of which one stage alone is sharded, and the actions that its devices issue."""
    case = CASES["batchnorm with a skip"]
    trained = Trained(team, case, 4, 2)
    plan = runs_of_all(evolve(trained.pipe.plan, shard=("none", shard)))
    pipe = pipeline_on(team, case, 4, 2, OPTIMIZER, dtype=F64, plan=plan)
    part = batches(case, team.replicas, [4] * team.replicas)[team.replica]
    far = 0.0
    for _ in range(2):
        trained.step([4] * team.replicas)
        _, trace = pipe.trace_step(part)
        far = largest((far, _distance(pipe, trained.alone)))
    kinds = ("UNSHARD", "RESHARD", "SCATTER_GRAD")
    return {"partly": far, "actions": sorted({str(e.action) for e in trace.events if e.action.kind.value in kinds})}
