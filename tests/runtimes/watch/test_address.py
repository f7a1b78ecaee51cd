"""The interface on which rank 0 listens."""

import socket

import pytest
from panpipe.runtimes.watch import address
from panpipe.runtimes.watch.address import listen_for_store, own_address

V4, V6 = socket.AF_INET, socket.AF_INET6


@pytest.fixture
def host(monkeypatch):
    """A host with the addresses 127.0.0.1 and 10.0.0.5; its name means 127.0.1.1 in its own table."""
    names = {"localhost": [(V4, "127.0.0.1")], "here": [(V4, "127.0.1.1")], "10.0.0.5": [(V4, "10.0.0.5")]}
    own = {"127.0.0.1", "127.0.1.1", "10.0.0.5"}
    monkeypatch.setattr(address, "_resolved", lambda name: names.get(name, [(V4, name)]))
    monkeypatch.setattr(address, "_can_listen", lambda _, at: at in own)
    monkeypatch.setattr(address, "_towards", lambda at: "10.0.0.5")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("10.0.0.5", "10.0.0.5"),
        ("10.9.9.9", "10.0.0.5"),
        ("here", "10.0.0.5"),
        (None, "10.0.0.5"),
    ],
)
def test_address_is_that_at_which_other_hosts_find_this_one(master, expected, host):
    assert own_address(master) == (V4, expected)


def test_name_of_this_host_is_loopback_where_all_ranks_are_here(host, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert own_address("here") == (V4, "127.0.1.1")


def test_host_without_a_route_listens_on_loopback(host, monkeypatch):
    monkeypatch.setattr(address, "_towards", lambda at: None)
    assert own_address(None) == (V4, "127.0.0.1")
    assert own_address("here") == (V4, "127.0.1.1")


def test_store_of_an_address_that_others_know_differently_listens_everywhere(host):
    assert listen_for_store("here", 0) is None


def test_store_listens_on_one_interface():
    with listen_for_store("127.0.0.1", 0) as store:
        assert store.getsockname()[0] == "127.0.0.1"
        assert listen_for_store("127.0.0.1", store.getsockname()[1]) is None  # taken
