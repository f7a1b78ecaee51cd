"""CSV of unknown origin, as rows of cells within limits."""

import csv
import io
from collections.abc import Iterator

from ..errors import RequestError
from .limits import SCHEDULE, Limits, short


def parse_csv(text: str, origin: str, limits: Limits = SCHEDULE) -> Iterator[list[str]]:
    """The rows of a CSV file in the Excel dialect.

    Args:
        text: of the file.
        origin: the name to use for it in errors, usually its path.
        limits: of its format; the values are cells.

    Raises:
        RequestError: it is not CSV, or exceeds a limit.
    """
    if text.count(",") + text.count("\n") + text.count("\r") > limits.values:
        raise RequestError(f"{origin} has more than {limits.values} cells: write it again")
    rows = csv.reader(io.StringIO(text, newline=""))
    number = 0
    while True:
        number += 1
        try:
            cells = next(rows, None)
        except csv.Error as error:  # a cell above csv's own limit, a line break in one
            raise RequestError(f"{origin}, row {number}: it is not CSV ({error}); write it again") from None
        if cells is None:
            return
        for column, cell in enumerate(cells, start=1):
            if len(cell) > limits.text:
                raise RequestError(
                    f"{origin}, row {number}, column {column}: the cell {short(cell[:40])}… has {len(cell)} "
                    f"characters, and at most {limits.text} are read; write it again"
                )
        yield cells
