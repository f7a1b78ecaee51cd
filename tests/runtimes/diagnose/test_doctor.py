"""The checks of a model: which plans run, what counts as right, and parts that cannot be cut."""

import itertools
from functools import partial

import pytest
import torch
from attrs import evolve
from panpipe.runtimes.diagnose.doctor import (
    TOLERANCES,
    Check,
    CheckedModel,
    Findings,
    check_model,
    in_dtype,
    uncut_operators,
)
from panpipe.runtimes.launch.team import ThreadTeam
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:microbatches of a new shape")  # one of its batches

F32, F64 = torch.float32, torch.float64


def step(model, batch):
    return model(batch).pow(2).mean()


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 4), *more)


@pytest.fixture(scope="module")
def checked():
    return CheckedModel(network(), step, torch.randn(6, 4), 3)


def test_model_is_a_copy_in_the_dtype_of_the_checks(checked):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    found = CheckedModel(model, step, torch.randn(2, 4), 3)
    assert found.model is not model
    assert model[0].weight.dtype is F32
    assert found.model[0].weight.dtype is F64
    assert found.batch.dtype is F64
    assert found.microbatches == 2  # it has no third sample
    assert checked.microbatches == 3


def test_plan_that_runs_has_a_distance_within_rounding(checked):
    team = ThreadTeam(2)
    check = checked.check(team, "1f1b", 1)
    team.close()
    assert (check.devices, check.schedule, check.stages, check.problem) == (2, "1f1b", 2, "")
    assert check.distance.within(1e-9, 1e-9)
    assert not check.too_many_stages


def test_more_stages_than_operators_are_a_problem_that_is_not_the_models(checked):
    team = ThreadTeam(4)
    check = checked.check(team, "v-half", 2)
    team.close()
    assert check.distance is None
    assert check.too_many_stages
    assert "8 stages for " in check.problem


def test_plan_may_be_changed_before_it_runs(checked):
    seen = []

    def change(plan):
        seen.append(plan)
        return evolve(plan, memory=evolve(plan.memory, recompute=(0,)))

    team = ThreadTeam(2)
    check = checked.check(team, "1f1b", 1, steps=1, change=change)
    team.close()
    assert len(seen) == 1
    assert check.distance.within(1e-9, 1e-9)


def findings(*checks, dtype=F64):
    return Findings("Model", dtype, 4, 1.0, {}, (), checks)


class Far:
    """A distance of a check."""

    def __init__(self, size):
        self.size = size

    def within(self, values, gradients):
        return self.size <= min(values, gradients)


RIGHT, WRONG = Check(2, "1f1b", 2, Far(1e-10), "", 1.0), Check(2, "1f1b", 2, Far(1e-6), "", 1.0)
FAILED, IMPOSSIBLE = Check(2, "1f1b", 2, None, "it stops", 1.0), Check(8, "1f1b", 8, None, "few", 1.0, True)


@pytest.mark.parametrize(
    ("checks", "healthy"),
    [
        ((RIGHT,), True), ((), True), ((RIGHT, WRONG), False), ((RIGHT, FAILED), False), ((RIGHT, IMPOSSIBLE), True),
        ((IMPOSSIBLE,), False),
    ],
)  # fmt: skip
def test_model_is_healthy_if_every_possible_plan_is_right(checks, healthy):
    assert findings(*checks).healthy is healthy


def test_tolerances_are_those_of_the_dtype():
    assert not findings(dtype=F64).right(WRONG)
    assert findings(dtype=F32).right(WRONG)


def test_only_floating_point_leaves_change_their_dtype():
    assert in_dtype(torch.zeros(1), F64).dtype is F64
    assert in_dtype(torch.zeros(1, dtype=torch.int64), F64).dtype is torch.int64
    assert in_dtype(3, F64) == 3


class Unrolled(nn.Module):
    """Writes a tensor in place again and again: no cut can divide it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        made = torch.zeros_like(x)
        for column in range(4):
            made[:, column] = self.linear(x)[:, column]  # WRITES
        return made


def test_large_parts_that_cannot_be_cut_have_the_line_that_writes():
    found = uncut_operators(CheckedModel(network(Unrolled()), step, torch.randn(6, 4), 3).operators)
    assert found
    assert 0.1 < found[0].share < 1
    assert "test_doctor.py" in found[0].line
    assert not uncut_operators(CheckedModel(network(), step, torch.randn(6, 4), 3).operators)


def no_float64(model, batch):
    if batch.dtype is F64:
        raise NotImplementedError("no kernel for float64")
    return step(model, batch)


def test_check_up_runs_both_schedules_on_each_team_and_closes_it():
    teams = []

    def make(devices):
        teams.append(ThreadTeam(devices))
        return teams[-1]

    found = check_model(network(), no_float64, torch.randn(6, 4), [partial(make, 2)])
    assert found.dtype is F32  # float64 is not supported
    assert [(check.schedule, check.stages) for check in found.checks] == [("1f1b", 2), ("v-half", 4)]
    assert found.healthy
    assert (found.model, found.regions, found.uncut) == ("Sequential", {}, ())
    assert len(teams) == 2
    assert all(not team._threads for team in teams)


@pytest.mark.parametrize("source", [itertools.count(1), itertools.cycle([1.0, 1.0, 1.0, 2.0])], ids=["count", "cycle"])
def test_a_step_that_computes_something_else_each_time_is_found(source):
    model = network()
    checked = CheckedModel(model, lambda m, x: m(x).square().mean() * next(source), torch.randn(6, 4), 3)
    assert not checked_right(checked.check(ThreadTeam(2), "1f1b", 1))


def test_a_table_of_the_first_length_is_found():
    class Scaled(nn.Module):
        scale = None

        def forward(self, x):
            if self.scale is None:
                self.scale = torch.tensor(float(len(x)))
            return x * self.scale

    checked = CheckedModel(network(Scaled()), step, torch.randn(6, 4), 3)
    assert not checked_right(checked.check(ThreadTeam(2), "1f1b", 1))


def checked_right(check):
    assert check.distance is not None, check.problem
    return check.distance.within(*TOLERANCES[torch.float64])
