"""The cached plan of a request: found again for the same request alone, and not if it cannot be used."""

import functools
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.planning import plan_cache as module
from panpipe.runtimes.planning.contest import Turn
from panpipe.runtimes.planning.plan_cache import CachedPlans, EarlierPlans

from ...support.plans import options_of, orders, plan_of

PLAN = evolve(plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1)), graph_hash="abc")
FOUND = CachedPlans([PLAN], (Turn(0.5, 64),))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "measured_properties", lambda where, threads: "this machine")
    monkeypatch.setenv("PANPIPE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def lines():
    return []


@pytest.fixture
def planning(lines):
    team = ThreadTeam(2)

    def request(optimizer=None, microbatches=2, graph="abc", parameters=None, **options):
        options = {"schedule": "1f1b", "cache": True, **options}
        named = {"w": torch.zeros(2)} if parameters is None else parameters
        return SimpleNamespace(
            options=options_of(**options), report=lines.append, team=team, microbatches=microbatches,
            optimizer=optimizer, example=SimpleNamespace(shape="(4, 2)"),
            operators=SimpleNamespace(graph=SimpleNamespace(hash=graph)),
            measured=SimpleNamespace(where=dict.fromkeys(range(2), CPU), parameters=named, buffers={}),
        )  # fmt: skip

    yield request
    team.close()


def test_plan_is_found_by_the_same_request(planning, lines, folder):
    assert EarlierPlans(planning(), {"seed": 1}).find() is None
    EarlierPlans(planning(), {"seed": 1}).keep(FOUND)
    assert EarlierPlans(planning(), {"seed": 1}).find() == FOUND
    (line,) = lines
    assert line.startswith("plan of an earlier run: by hand, 2 stages")
    assert str(folder) in line


@pytest.mark.parametrize(
    "other",
    [
        {"microbatches": 4}, {"graph": "def"}, {"parameters": {"w": torch.zeros(3)}}, {"schedule": "gpipe"},
        {"parameters": {"w": torch.zeros(2, dtype=torch.float64)}},
        {"parameters": {"w": torch.zeros(2, requires_grad=True)}},
        {"max_chunks": 1}, {"recompute": "all"}, {"offload": "auto"}, {"shard": "optimizer"}, {"boundaries": "layers"},
        {"cluster": fully_connected(2, 1, 1.0, 0.0)}, {"optimizer": torch.optim.SGD},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_another_request_has_another_key(planning, other):
    EarlierPlans(planning(), {"seed": 1}).keep(FOUND)
    assert EarlierPlans(planning(**other), {"seed": 1})._key != EarlierPlans(planning(), {"seed": 1})._key
    assert EarlierPlans(planning(**other), {"seed": 1}).find() is None


def test_another_value_of_the_caller_has_another_key(planning):
    EarlierPlans(planning(), {"seed": 1}).keep(FOUND)
    assert EarlierPlans(planning(), {"seed": 2}).find() is None


def test_learning_rate_does_not_change_the_plan_and_the_size_of_the_state_does(planning):
    def key(**options):
        make = functools.partial(torch.optim.SGD, **options)
        return EarlierPlans(planning(optimizer=make), {})._key["optimizer"]

    assert key(lr=0.1) == key(lr=0.2)
    assert key(lr=0.1) != key(lr=0.1, momentum=0.9)
    assert key(lr=0.1, nesterov=False) != key(lr=0.1, nesterov=True, momentum=0.9)
    assert "SGD" in key(lr=0.1)


def test_another_machine_or_another_distribution_over_hosts_has_another_key(planning, monkeypatch):
    key = EarlierPlans(planning(), {})._key["machines"]
    assert key == "[('this machine', 0), ('this machine', 0)]"
    names = iter(["a", "b"])
    monkeypatch.setattr(module.socket, "gethostname", lambda: next(names))
    monkeypatch.setattr(module, "measured_properties", lambda where, threads: "another")
    assert EarlierPlans(planning(), {})._key["machines"] == "[('another', 0), ('another', 1)]"


def test_values_whose_text_a_file_cannot_hold_are_digested(planning):
    found = EarlierPlans(planning(), {"lines": "a\nb", "long": "x" * (1 << 20)})._key
    assert found["lines"] == "'a\\nb'"
    assert len(found["long"]) == 64


class Lines:
    def __repr__(self):
        return "several\nlines"


def test_repr_with_line_breaks_is_digested(planning):
    assert len(EarlierPlans(planning(), {"value": Lines()})._key["value"]) == 64


@pytest.mark.parametrize("change", [{"graph_hash": "def"}, {"mesh": Mesh(2, 2)}, {"placement": None}])
def test_plan_that_cannot_be_used_is_reported_and_planned_anew(planning, lines, change):
    plan = evolve(PLAN, device_actions=PLAN.device_actions[::-1]) if "placement" in change else evolve(PLAN, **change)
    earlier = EarlierPlans(planning(), {})
    earlier.keep(CachedPlans([plan]))
    assert earlier.find() is None
    assert "cannot be used, planning anew: " in lines[0]


def test_nothing_is_cached_if_it_is_not_wanted(planning, folder):
    earlier = EarlierPlans(planning(cache=False), {})
    earlier.keep(FOUND)
    assert earlier.find() is None
    assert not list(folder.iterdir())
