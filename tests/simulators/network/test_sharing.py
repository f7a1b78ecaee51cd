"""Max-min fair shares: small cases by hand, and the laws that define them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.simulators.network.sharing import fair_rates

INFINITE = float("inf")


@pytest.mark.parametrize(
    ("routes", "limits", "capacity", "rates"),
    [
        ([["a"]], [INFINITE], {"a": 10.0}, [10.0]),
        ([["a"], ["a"]], [INFINITE, INFINITE], {"a": 10.0}, [5.0, 5.0]),
        ([["a"], ["a"]], [2.0, INFINITE], {"a": 10.0}, [2.0, 8.0]),
        # The second is held to 2 by b, and what it leaves of a goes to the first.
        ([["a"], ["a", "b"], ["b"]], [INFINITE] * 3, {"a": 10.0, "b": 4.0}, [8.0, 2.0, 2.0]),
        ([[]], [3.0], {}, [3.0]),
        # Two edges of a ring over one link, next to a message: three shares.
        ([["a", "a"], ["a"]], [5.0, INFINITE], {"a": 9.0}, [3.0, 3.0]),
    ],
)
def test_fair_rates_by_hand(routes, limits, capacity, rates):
    assert fair_rates(routes, limits, capacity)[0] == rates


@given(st.data())
def test_fair_rates_obey_capacities_and_limits(data):
    capacity = {link: data.draw(st.floats(1.0, 100.0)) for link in "abcd"}
    routes = data.draw(st.lists(st.lists(st.sampled_from("abcd"), min_size=1, unique=True), min_size=1, max_size=8))
    limits = [data.draw(st.one_of(st.just(INFINITE), st.floats(0.5, 50.0))) for _ in routes]
    rates, held_by = fair_rates(routes, limits, capacity)
    load = {link: sum(rate for route, rate in zip(routes, rates, strict=True) if link in route) for link in capacity}
    assert all(load[link] <= capacity[link] * (1 + 1e-9) for link in capacity)
    for route, limit, rate, holder in zip(routes, limits, rates, held_by, strict=True):
        assert rate > 0
        if holder is None:
            assert rate == limit
        else:
            assert holder in route
            assert load[holder] >= capacity[holder] * (1 - 1e-9)
        # Each is held by its own limit, or by a full link on which nobody gets more.
        held = rate >= limit * (1 - 1e-9) or any(
            load[link] >= capacity[link] * (1 - 1e-9)
            and all(rate >= r * (1 - 1e-9) for other, r in zip(routes, rates, strict=True) if link in other)
            for link in route
        )
        assert held
