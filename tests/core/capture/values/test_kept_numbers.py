"""Numbers that a step keeps in Python, followed through a trial run."""

import math
import operator
import re

import numpy
import pytest
import torch
from panpipe.core.capture.values.kept_numbers import Followed, KeptNumber
from panpipe.core.capture.values.text_marks import plain


@pytest.fixture
def followed():
    return Followed()


def test_arithmetic_gives_kept_numbers_with_the_values_of_python(followed):
    n = KeptNumber(7, followed)
    found = [n + 1, 1 - n, n * 2.0, n / 2, n // 2, 9 % n, n**2, -n, abs(n), round(n / 2, 1), math.floor(n / 2)]
    assert all(type(each) is KeptNumber for each in found)
    assert [each.value for each in found] == [8, -6, 14.0, 3.5, 3, 2, 49, -7, 7, 3.5, 3]
    assert [each.value for each in divmod(n, 4)] == [1, 3]
    assert isinstance(n, int)
    assert isinstance(n / 2, float)
    assert (followed.taken, followed.escaped) == ([], False)


def unmarked(text):
    return re.sub("\x01[0-9]+\x01", "", plain(text))


def test_texts_have_the_value_and_a_mark_each(followed):
    n = KeptNumber(7, followed)
    text = f"{n:03d} {n} {n / 2:.2f}"
    assert unmarked(text) == "007 7 3.50"
    assert text.count("\x01") == 6
    assert [unmarked(each) for each in (str(n), repr(n), "at " + str(n))] == ["7", "7", "at 7"]
    assert not followed.escaped


def test_texts_arrive_where_they_are_shown(followed):
    n = KeptNumber(7, followed)
    texts = [f"{n} and {n}", "%d of %.1f" % (n, n), str(n)]  # noqa: UP031 - the conversion is the subject
    assert not followed.all_arrived()
    followed.arrive([*texts[:2], 3])
    assert not followed.all_arrived()
    followed.arrive(texts[2:])
    assert followed.all_arrived()
    followed.begin()
    assert followed.all_arrived()


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t == "7", lambda t: t != "7", lambda t: operator.eq("7", t), lambda t: t < "8", len, hash, list,
        {"7": 1}.get, lambda t: "7" in t, lambda t: t in ("6", "7"), lambda t: t.startswith("7"),
        lambda t: t[0], lambda t: t.split(), lambda t: f"{t:>9}", lambda t: ("at " + t) == "at 7", lambda t: t * 2,
    ],
)  # fmt: skip
def test_uses_of_a_texts_characters_are_recorded(followed, use):
    text = str(KeptNumber(7, followed))
    with pytest.raises(TypeError, match="of a text of a number that the step keeps"):
        use(text)
    assert followed.escaped


def test_conditions_are_recorded_and_forced(followed):
    def run():
        n = KeptNumber(7, followed)
        return "tenth" if n % 10 == 0 else "large" if n > 5 else "small"

    assert (run(), followed.taken) == ("large", [False, True])
    followed.begin([True])
    assert (run(), followed.taken) == ("tenth", [True])
    followed.begin([False, False])
    assert (run(), followed.taken) == ("small", [False, False])


@pytest.mark.parametrize(
    "use",
    [
        int, float, math.sqrt, range, hash, lambda n: [1] * n, {}.get, lambda n: torch.ones(2) * n,
        lambda n: n * torch.ones(2), lambda n: torch.ones(2).add(1, alpha=n), lambda n: n.bit_length(),
        lambda n: torch.as_tensor(numpy.ones(2) * n), lambda n: [0, 1][n],
    ],
)  # fmt: skip
def test_other_uses_of_the_value_are_recorded(followed, use):
    with pytest.raises(TypeError):
        use(KeptNumber(1, followed))


def test_comparisons_with_other_objects_are_those_of_python(followed):
    n = KeptNumber(1, followed)
    assert n != "1"
    assert not n == None  # noqa: E711, SIM201 - the comparison is the subject
    with pytest.raises(TypeError, match="not supported between"):
        n < "1"  # noqa: B015 - the comparison is the subject
