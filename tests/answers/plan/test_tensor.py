"""``--tp``: which numbers of tensor ranks are tried, and plans for groups as plans for their devices."""

import pytest
from attrs import evolve
from panpipe.answers import bundled_models
from panpipe.answers.plan import request as tensor
from panpipe.answers.plan.request import wanted_tensor
from panpipe.core.cluster.catalog.find import find_cluster
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.errors import RequestError

EIGHT = fully_connected(8, 10**9, 1e9, 0.0)


@pytest.fixture
def sizes(monkeypatch):
    known = {"attention heads": 16, "features inside the MLP": 64}
    monkeypatch.setitem(bundled_models.BUNDLED, "net", None)
    monkeypatch.setattr(tensor, "shared_sizes", lambda model: known)
    return known


def wanted(tp, machine=EIGHT, cluster="eight", model="net"):
    return list(wanted_tensor(tp, machine, cluster, model))


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
