"""Whole numbers that users give."""

import pytest
from panpipe.core.arguments import whole_number
from panpipe.core.errors import RequestError


@pytest.mark.parametrize("given", [0, -1, 2.0, 2.5, "4", True, None, [1]])
def test_other_values_are_refused_with_the_name_and_the_rule(given: object) -> None:
    with pytest.raises(RequestError) as refused:
        whole_number("microbatches", given, 1)
    assert str(refused.value) == f"microbatches is {given!r}: give a whole number, at least 1"
