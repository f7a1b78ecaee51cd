"""``--tp``: which numbers of tensor ranks are tried, and plans for groups as plans for their devices."""

import pytest
from attrs import evolve
from panpipe.answers import bundled_models
from panpipe.answers.plan import choices as tensor
from panpipe.answers.plan.choices import wanted_tensor, with_tensor_ranks
from panpipe.core.cluster.catalog.find import find_cluster
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.cluster.mesh import Mesh, plain
from panpipe.core.cluster.tensor_groups import consecutive_groups
from panpipe.core.errors import RequestError

from ...support.plans import orders, plan_of

EIGHT = fully_connected(8, 10**9, 1e9, 0.0)


@pytest.fixture
def sizes(monkeypatch):
    known = {"attention heads": 16, "features inside the MLP": 64}
    monkeypatch.setitem(bundled_models.BUNDLED, "net", None)
    monkeypatch.setattr(tensor, "shared_sizes", lambda model: known)
    return known


def wanted(tp, machine=EIGHT, cluster="eight", model="net"):
    return list(wanted_tensor(tp, machine, cluster, model))


def test_given_number_of_tensor_ranks_is_the_only_one(sizes):
    assert wanted(None) == wanted("1") == [1]
    assert wanted("4") == [4]
    assert list(wanted_tensor("2", EIGHT, "eight", "module:factory")) == [2]


def test_automatic_numbers_divide_devices_and_sizes(sizes):
    assert wanted("auto") == [1, 2, 4, 8]
    sizes["attention heads"] = 12
    assert wanted("auto") == [1, 2, 4]
    assert wanted("auto", fully_connected(6, 10**9, 1e9, 0.0)) == [1, 2]


def test_automatic_numbers_stay_within_equal_and_near_devices(sizes):
    assert wanted("auto", find_cluster("2x4xH100")) == [1, 2, 4]  # the others are in another node
    assert wanted("auto", find_cluster("4xRTX3090")) == [1, 2]  # bridged pairs
    other = evolve(EIGHT, devices=(*EIGHT.devices[:7], evolve(EIGHT.devices[7], memory_bytes=5)))
    assert wanted("auto", other) == [1]


@pytest.mark.parametrize(
    ("tp", "cluster", "model", "said"),
    [
        ("0", "eight", "net", "--tp is '0': give a whole number of at least 1, or auto"),
        ("many", "eight", "net", "--tp is 'many'"),
        ("-2", "eight", "net", "--tp is '-2'"),
        ("2", "eight", None, "--graph gives operators with their costs alone: leave --tp out"),
        ("auto", "eight", "module:factory", "--tp auto is for bundled models"),
        ("2", "cpu:8", "net", "'cpu:8' is this host: name a cluster"),
        ("3", "eight", "net", "3"),
    ],
)
def test_other_numbers_are_refused(sizes, tp, cluster, model, said):
    with pytest.raises(RequestError, match=said):
        wanted(tp, cluster=cluster, model=model)


def test_plan_for_groups_is_one_for_their_devices():
    grouped = consecutive_groups(EIGHT, 2)
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), data=2, cluster=grouped)
    found = with_tensor_ranks(plan, grouped)
    assert (found.mesh.pipeline, found.mesh.data, found.mesh.tensor) == (2, 2, 2)
    assert found.mesh.devices is None  # the devices in order: a plain mesh
    assert found.mesh == plain(Mesh(2, 2, ((0, 1, 2, 3), (4, 5, 6, 7)), 2))
    assert found.predicted.cluster == EIGHT


def test_plan_for_single_devices_is_unchanged():
    plan = plan_of(orders("0F0 0B0"), (0,))
    assert with_tensor_ranks(plan, EIGHT) is plan
