"""Whole numbers that users give."""

import numpy as np
import pytest
from panpipe.core.errors import RequestError
from panpipe.core.whole_numbers import whole_number


def test_integers_of_any_library_are_ints() -> None:
    found = whole_number("microbatches", np.int64(4), 1)
    assert (found, type(found)) == (4, int)
    assert whole_number("seed", -3) == -3


@pytest.mark.parametrize("given", [0, -1, 2.0, 2.5, "4", True, None, [1]])
def test_other_values_are_refused_with_the_name_and_the_rule(given: object) -> None:
    with pytest.raises(RequestError) as refused:
        whole_number("microbatches", given, 1)
    assert str(refused.value) == f"microbatches is {given!r}: give a whole number, at least 1"


def test_refusal_of_a_large_value_is_short() -> None:
    with pytest.raises(RequestError, match=r"^seed is .{40}: give a whole number$"):
        whole_number("seed", "1" * 1000)
