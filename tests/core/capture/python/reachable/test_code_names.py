"""Names, strings and lines that are read from bytecode."""

from panpipe.core.capture.python.reachable.code_names import (
    line_in,
    names_in,
    prefixes_in,
    read_line,
    strings_in,
    written_line,
)


class Model:
    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        if self.scale > 3:
            return x
        return getattr(self, f"weight_{self.index}") * x

    def nested(self):
        return [self.inner for _ in range(3)], lambda: "outer"


FORWARD, NESTED = Model.forward.__code__, Model.nested.__code__


def line(text: str) -> int:
    """Number of the first line of this file with a text."""
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, one in enumerate(file, start=1) if text in one)


def test_names_include_nested_functions_and_strings_only_where_getattr_may_get_them():
    assert {"calls", "seen", "scale", "index"} <= names_in(FORWARD, False)
    assert "inner" in names_in(NESTED, False)
    assert "outer" not in names_in(NESTED, False)
    assert "outer" in names_in(NESTED, True)


def test_prefixes_are_those_of_names_built_for_getattr():
    assert prefixes_in(FORWARD) == {"weight_"}
    assert prefixes_in(NESTED) == set()


def test_strings_include_those_of_nested_functions():
    assert "outer" in strings_in(NESTED)


def test_line_in_is_the_first_line_with_a_name():
    assert line_in(FORWARD, "scale") == line("self.scale > 3")
    assert line_in(NESTED, "inner") == line("self.inner for")
    assert line_in(FORWARD, "missing") is None


def test_read_line_ignores_reads_of_a_line_that_also_writes():
    assert read_line([FORWARD], "scale") == f"{__file__}:{line('self.scale > 3')}"
    assert read_line([FORWARD], "calls") is None
    assert read_line([FORWARD], "seen") is None


def test_written_line_is_the_first_write_or_else_the_first_line_with_the_name():
    assert written_line([FORWARD], "calls") == f"{__file__}:{line('self.calls += 1')}"
    assert written_line([FORWARD], "scale") == f"{__file__}:{line('self.scale > 3')}"
    assert written_line([FORWARD], "missing") is None
