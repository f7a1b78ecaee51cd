"""Layers that only one branch on a value uses: optimizers skip them if no microbatch takes it, as in eager PyTorch."""

import functools
from types import SimpleNamespace

import pytest
import torch
from panpipe.core.capture.regions.gradient_paths import GradientPaths, GradientReach
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.training.missing_gradients import MissingGradients

from ...support.launch import results
from ...support.programs.unused_branches import ADAM, SGD, batches, distances, named_programs, without_pipeline

PLAIN = named_programs["layers_before_the_branch"]


def far(*arguments, **plan):
    """The largest distance from eager PyTorch over two devices."""
    return max(distances(ThreadTeam(2), *arguments, **plan).values())


@pytest.mark.parametrize("optimizer", [
    pytest.param(ADAM, id="AdamW"),
    pytest.param(SGD, id="SGD", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("make", named_programs.values(), ids=list(named_programs))
def test_layers_of_a_branch_that_no_microbatch_takes_are_skipped(make, optimizer):
    assert far(make, optimizer) < 1e-12


@pytest.mark.parametrize("plan", [{"split": True}, {"schedule_name": "zb-v", "chunks": 2}], ids=["split", "zb-v"])
def test_layers_are_skipped_where_backwards_are_split(plan):
    assert far(PLAIN, ADAM, **plan) < 1e-12


def test_layers_are_skipped_where_a_device_has_no_stage():
    assert far(PLAIN, ADAM, placement=[1, 1]) < 1e-12


def test_a_gradient_of_an_earlier_accumulated_batch_is_kept():
    updates = [False, True, False, True, False, False]
    assert far(PLAIN, ADAM, updates) < 1e-12


@pytest.mark.parametrize(("ranks", "mesh"), [
    (2, "pp=2"),
    pytest.param(4, "pp=2,dp=2", marks=pytest.mark.slow),
])  # fmt: skip
def test_layers_are_skipped_over_ranks(ranks, mesh, tmp_path):
    for found in results("unused_branches", tmp_path, ranks, MESH=mesh):
        for name, distance in found.items():
            assert distance < 1e-12, name


def test_the_programs_take_both_branches():
    """Some updates have a gradient of the layers, and some have none."""
    seen = set()

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen.add(tuple(p.grad is None for group in self.param_groups for p in group["params"]))
            return super().step(closure)

    model, step = PLAIN()
    without_pipeline(model, step, batches(), functools.partial(Watched, lr=0.1))
    assert {any(row) for row in seen} == {True, False}


def test_replicas_that_do_not_compare_a_missing_gradient_refuse_the_step(monkeypatch):
    """The example's step has no condition, and a later one has."""
    through = GradientPaths(("head.weight",), crossings=((0, 0, 0),), loss=GradientReach(results=frozenset({(0, 0)})))
    operators = [SimpleNamespace(paths=paths) for paths in (GradientPaths(), through)]
    team = SimpleNamespace(local=(0,), replicas_of=lambda device: object())
    missing = MissingGradients(team, SimpleNamespace(), operators[0])
    monkeypatch.setattr(missing, "_crossed", lambda device, prepared, paths: [frozenset()])
    prepared = SimpleNamespace(compiled=[SimpleNamespace(operators=operators[1])])
    agreement = SimpleNamespace(arrive=lambda: None, differ=lambda: False)
    with pytest.raises(RequestError, match=r"uses parameter 'head\.weight'.*give panpipe\.pipeline an example batch"):
        missing.drop(0, prepared, agreement, accumulating=False, over_replicas=True)
