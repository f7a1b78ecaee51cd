"""Elements of charts: short numbers, colours, and a time axis."""

import re

import pytest
from panpipe.core.actions import Kind
from panpipe.core.report.chart.elements import class_name, colours, px, time_axis
from panpipe.core.report.chart.layout import Axis


@pytest.mark.parametrize(("value", "text"), [(1.0, "1"), (100.0, "100"), (1.256, "1.26"), (0.5, "0.5"), (0.0, "0")])
def test_pixels_are_written_without_needless_digits(value, text):
    assert px(value) == text


def test_later_chunks_are_paler_and_labels_stay_readable():
    rules = colours([Kind.F, Kind.B], 3)
    shades = [tuple(map(int, found)) for found in re.findall(r"\.f\d rect\{fill:rgb\((\d+),(\d+),(\d+)\)\}", rules)]
    assert len(shades) == 3
    assert shades == sorted(shades)
    assert ".f0 text{fill:#fff}" in rules  # dark
    assert ".f2 text" not in rules  # pale
    assert ".b0 text" not in rules  # orange is light
    assert class_name(Kind.B, 2) == "b2"
    assert ".b2 rect" in rules


def test_time_axis_has_a_line_and_a_label_at_every_tick():
    found = list(time_axis(Axis(4.0, 360.0), 50.0))
    assert [re.search(r">([^<]+)</text>", line)[1] for line in found] == ["0", "1", "2", "3", "4"]
    assert 'd="M90 -4V50"' in found[1]
