"""Numbers with their sources: tables taken apart and joined again, and numbers without one."""

import pytest
from attrs import field, frozen
from panpipe.core.cluster.sourced import Source, is_number, joined, separate, structured
from panpipe.core.errors import RequestError


@frozen
class Part:
    name: str
    rates: dict[str, float]
    sources: dict[str, Source] = field(factory=dict)
    count: int | None = None


TABLE = {
    "name": "x",
    "rates": {"bf16": {"value": 3.0, "source": "data sheet"}, "fp32": {"value": 1.5, "assumed": "half of it"}},
    "count": {"value": 2, "source": "counted"},
}
SOURCES = {"rates.bf16": Source("data sheet"), "rates.fp32": Source("half of it", True), "count": Source("counted")}


def test_numbers_and_sources_are_separated_by_dotted_names():
    plain, sources = separate(TABLE, "part 'x'")
    assert plain == {"name": "x", "rates": {"bf16": 3.0, "fp32": 1.5}, "count": 2}
    assert sources == SOURCES
    assert [str(sources["rates.bf16"]), str(sources["rates.fp32"])] == ["data sheet", "assumed: half of it"]


def test_objects_are_built_from_tables_and_written_as_they_were_read():
    part = structured(TABLE, Part, "part 'x'")
    assert part == Part("x", {"bf16": 3.0, "fp32": 1.5}, SOURCES, 2)
    assert joined(part) == TABLE
    without = {key: value for key, value in TABLE.items() if key != "count"}
    assert joined(structured(without, Part, "part 'x'")) == without


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3.0, r"count of part 'x' is a bare 3\.0: write \{ value = 3\.0, source"),
        ({"value": 3}, "count of part 'x' has no source: give one of source and assumed"),
        ({"value": 3, "source": "a", "assumed": "b"}, "has assumed and source: give one"),
        ({"value": 3, "because": "a"}, "has because: give one"),
        ({"value": 3, "source": "  "}, "has the source '  ': describe in words"),
        ({"value": 3, "source": 7}, "has the source 7: describe in words"),
        ({"value": "many", "source": "a"}, "part 'x' is wrong: .*count"),
    ],
)
def test_number_without_one_source_is_refused(value, said):
    with pytest.raises(RequestError, match=said) as error:
        structured({**TABLE, "count": value}, Part, "part 'x'")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("change", "said"), [({"speed": "x"}, "part 'x' is wrong: .*speed")])
def test_field_that_is_unknown_or_wrong_is_refused(change, said):
    with pytest.raises(RequestError, match=said):
        structured({**TABLE, **change}, Part, "part 'x'")


def test_flags_are_no_numbers():
    assert [is_number(value) for value in ({"value": 1}, {"values": 1}, 3)] == [True, False, False]
    assert separate({"rails": True}, "x") == ({"rails": True}, {})
