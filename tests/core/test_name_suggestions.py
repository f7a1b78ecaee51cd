"""Suggestions for names that are not known."""

import pytest
from panpipe.core.wording import nearest

FEW = ["1f1b", "gpipe", "zb-h1", "zb-h2"]


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("gpip", FEW, "did you mean gpipe"),
        ("GPIPE", FEW, "did you mean gpipe"),
        ("zb-h3", FEW, "did you mean zb-h1 or zb-h2"),
        ("qqq", FEW, "known are 1f1b, gpipe, zb-h1, zb-h2"),
        ("A100", ["a100", "H100"], "did you mean a100"),
    ],
)
def test_names_that_look_alike_are_suggested_else_all_of_few(name, known, said):
    found = nearest(name, known)
    assert sorted(found.removeprefix("did you mean ").split(" or ")) == sorted(
        said.removeprefix("did you mean ").split(" or ")
    )
