"""Values in words, tables, JSON, and files that cannot be written."""

import json

import pytest
from panpipe.answers.output import (
    bytes_text,
    check_writable,
    print_json,
    print_table,
    readable,
    seconds_text,
    share_text,
)
from panpipe.core.errors import RequestError


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1.5e9, "1.50 GB"), (2e12, "2.00 TB"), (-1500, "-1.50 kB")],
)
def test_size_has_a_decimal_unit(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 µs"), (1.5e-5, "15 µs"), (0.0123, "12.3 ms"), (1, "1 s"), (1234.5, "1.23e+03 s")]
)
def test_time_has_a_unit(seconds, text):
    assert seconds_text(seconds) == text


def test_share_of_nothing_is_a_dash():
    assert (share_text(1, 8), share_text(1, 0)) == ("12.5%", "–")
    assert (readable(1.23456), readable(7), readable("a")) == ("1.235", "7", "a")


def test_json_has_null_for_infinity(capsys):
    print_json({"rate": float("inf"), "sizes": [1, float("nan"), (2.5,)]})
    assert json.loads(capsys.readouterr().out) == {"rate": None, "sizes": [1, None, [2.5]]}


def test_table_has_a_heading_and_no_trailing_spaces(capsys):
    print_table("sizes", ("stage", "bytes"), [("0", 10), ("12", 1.23456)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["", "sizes", "stage  bytes"]
    assert lines[-2:] == ["0         10", "12     1.235"]


def test_file_that_cannot_be_written_is_refused_with_the_reason(tmp_path, monkeypatch):
    check_writable(None, tmp_path / "plan.json")
    with pytest.raises(RequestError, match="it is a folder"):
        check_writable(tmp_path)
    with pytest.raises(RequestError, match="there is no folder"):
        check_writable(None, tmp_path / "none" / "plan.json")
    monkeypatch.setattr("panpipe.answers.output.os.access", lambda *_: False)
    with pytest.raises(RequestError, match="permission denied"):
        check_writable(tmp_path / "plan.json")
