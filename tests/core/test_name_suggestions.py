"""Suggestions for names that are not known."""

import pytest
from panpipe.core.name_suggestions import nearest

FEW = ["1f1b", "gpipe", "zb-h1", "zb-h2"]
MANY = [f"node{number}" for number in range(40)]


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("gpip", FEW, "did you mean gpipe"),
        ("GPIPE", FEW, "did you mean gpipe"),
        ("zb-h3", FEW, "did you mean zb-h1 or zb-h2"),
        ("qqq", FEW, "known are 1f1b, gpipe, zb-h1, zb-h2"),
        ("A100", ["a100", "H100"], "did you mean a100 or H100"),
    ],
)
def test_names_that_look_alike_are_suggested_else_all_of_few(name, known, said):
    found = nearest(name, known)
    assert sorted(found.removeprefix("did you mean ").split(" or ")) == sorted(
        said.removeprefix("did you mean ").split(" or ")
    )


def test_the_nearest_of_many_are_named_with_where_to_see_all():
    found = nearest("qqqq", MANY, "panpipe catalog")
    assert found.startswith("the nearest of 40 names are node")
    assert found.endswith("; see panpipe catalog")
    assert found.count("node") == 4
    assert nearest("qqqq", MANY).count(";") == 0


@pytest.mark.parametrize("name", ["zbv", "ZB_V", "zb v"])
def test_a_name_without_its_hyphens_is_one_suggestion(name):
    assert nearest(name, ["zb-v", "zb-h1", "v-min", "1f1b-v"]) == "did you mean zb-v"
