"""CSV of unknown origin: rows of cells within limits."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.files.limits import Limits
from panpipe.core.schedules.schedule_csv import parse_csv

FEW = Limits(size=1000, depth=3, values=10, text=20, lines=30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\r\n" + "c" * 21, "row 2, column 1"),
        ("," * 11, "more than 10 cells"),
        ('"' + "a" * 200_000, "row 1"),
    ],
)
def test_csv_outside_the_limits_is_refused(text, message):
    with pytest.raises(RequestError) as caught:
        list(parse_csv(text, "file.csv", FEW))
    assert message in str(caught.value)


def test_quoted_and_empty_cells_of_csv_are_read():
    assert list(parse_csv('a,"b,c"\r\n,d\r\n', "x", FEW)) == [["a", "b,c"], ["", "d"]]
