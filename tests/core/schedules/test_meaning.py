"""Names of searched schedules, in words."""

import pytest
from panpipe.core.schedules.meaning import meaning_of


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b(chunks=2)", "gpipe"])
def test_published_schedule_has_no_further_meaning(name):
    assert meaning_of(name) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("listed", "not from a published schedule"),
        ("auto(listed)", "improved by moves"),
        ("auto(packed)", "not from a published schedule"),
        ("auto(evaluations=100,seed=0)", "in brackets its budget and seed"),
        ("auto(zb-h1)", "derived from zb-h1, whose own order is slower here"),
        ("auto(interleaved-1f1b(chunks=2))", "derived from interleaved-1f1b,"),
    ],
)
def test_searched_schedule_is_described(name, words):
    assert words in meaning_of(name)
