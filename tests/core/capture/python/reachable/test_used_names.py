"""Names of attributes that code uses: constants, prefixes, names that it computes."""

import functools
import operator

import pytest
from panpipe.core.capture.python.reachable.used_names import UsedNames, names_of_getter, used_names


def reads_attributes(x):
    return x.scale + x.inner.bias


def reads_strings(x):
    return x.late


def reads_with_a_prefix(x, i):
    return getattr(x, f"weight_{i}") + x.gain


def reads_computed(x, name):
    return getattr(x, name)


def reads_computed_with_default(x, names):
    return sum(getattr(x, name, 0) for name in names)


def reads_mixed(x, name):
    return getattr(x.inner, name)


def reads_nested_constants(x):
    return x.inner.bias


def reads_all(x):
    return vars(x)


def reads_suffixed(x, i):
    return getattr(x, f"{i}_weight")


@pytest.mark.parametrize(
    ("function", "any_name"),
    [
        (reads_attributes, False), (reads_strings, False), (reads_with_a_prefix, False), (reads_computed, True),
        (reads_computed_with_default, True), (reads_mixed, True), (reads_nested_constants, False), (reads_all, True),
        (reads_suffixed, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_code_that_computes_names_may_read_any(function, any_name):
    assert used_names(function.__code__, True).any_name is any_name
    assert not used_names(function.__code__, False).any_name  # a library's code is not the user's


def test_names_and_prefixes_of_code():
    found = used_names(reads_with_a_prefix.__code__, True)
    assert {"gain", "getattr"} <= found.names
    assert "weight_3" in found
    assert "bias_3" not in found
    assert "scale" in used_names(reads_attributes.__code__, False)
    assert "scale" not in used_names(reads_strings.__code__, False)


def test_union_of_used_names_has_the_names_of_both():
    one = UsedNames(frozenset({"a"}), frozenset({"w_"}), False)
    other = UsedNames(frozenset({"b"}), frozenset(), True)
    assert one | other == UsedNames(frozenset({"a", "b"}), frozenset({"w_"}), True)
    assert "w_1" in one
    assert "w_1" not in other
    assert "a" not in UsedNames()
    assert not (UsedNames() | UsedNames()).any_name


def test_names_that_getters_look_up():
    assert names_of_getter(operator.attrgetter("a.b", "c")) == {"a", "b", "c"}
    assert names_of_getter(operator.methodcaller("run", 3)) == {"run"}
    assert names_of_getter(functools.partial(operator.methodcaller, "run")("x")) == {"run", "x"}
