"""Operators of a stage, as a short list of modules."""

from panpipe.core.report.data import MOST, condensed


def test_few_operators_are_listed_with_their_full_names():
    assert condensed(["token/embedding", "/add"]) == [("token.embedding", 1), ("add", 1)]
    assert condensed([]) == []


def test_modules_with_consecutive_numbers_are_one_line():
    names = [f"h.{block}.{part}/op" for block in range(12) for part in ("attn", "mlp")]
    assert condensed(names) == [("h.0–11", 24)]


def test_modules_with_other_numbers_are_separate_lines():
    names = [f"h.{block}/op{part}" for block in (0, 1, 5, 6) for part in ("a", "b", "c")]
    assert condensed(names) == [("h.0–1", 6), ("h.5–6", 6)]


def test_what_does_not_fit_is_counted_in_the_last_line():
    names = [f"{chr(97 + number)}/op" for number in range(12)]
    found = condensed(names)
    assert len(found) == MOST
    assert found[0] == ("a", 1)
    assert found[-1] == ("… 5 more", 5)
