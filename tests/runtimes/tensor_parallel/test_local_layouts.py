"""The layouts that views give one rank's part of a tensor; shapes are those of the part, with two ranks."""

import pytest
from panpipe.runtimes.tensor_parallel.local_layouts import WHOLE, LayoutError, Local, viewed


@pytest.mark.parametrize(
    ("shape", "part", "new", "expected"),
    [
        ((4, 6, 12), 2, (4, 6, 3, 4), Local(2)),  # three heads
        ((4, 6, 4), 2, (4, 6, 1, 4), Local(2)),  # one head
        ((4, 6, 3, 4), 2, (4, 6, 12), Local(2)),
        ((4, 6, 12), 2, (24, 12), Local(1)),
        ((24, 12), 1, (4, 6, 12), Local(2)),
        ((4, 6, 12), 2, (4, 18, 4), Local(1, outer=6)),  # heads of all tokens, as in attention with one key head
        ((4, 3, 6, 4), 1, (12, 6, 4), Local(0, outer=4)),  # heads of all samples
        ((4, 3, 6), 1, (4, 18), Local(1)),
    ],
)
def test_view_that_keeps_the_divided_dimension(shape, part, new, expected):
    layout = viewed(shape, Local(part), new)
    assert layout == expected
    assert viewed(new, layout, shape) == Local(part)


@pytest.mark.parametrize(
    ("shape", "part", "new"),
    [
        ((4, 6, 12), 2, (4, 3, 6, 4)),  # six heads of the whole model
        ((4, 6, 12), 2, (4, 9, 8)),
        ((4, 6, 1), 2, (4, 6)),
    ],
)
def test_view_across_the_divided_dimension_is_an_error(shape, part, new):
    with pytest.raises(LayoutError):
        viewed(shape, Local(part), new)


def test_dimension_of_one_head_is_that_of_one_process():
    shape = (4, 1, 6, 3)
    assert viewed(shape, Local(1), (4, 6, 3), divided=0) == Local(0, outer=4)
    assert viewed(shape, Local(1), (4, 6, 3), divided=1) == Local(1)
    assert viewed((4, 6, 3), Local(0, outer=4), shape, divided=1) == Local(1)
    assert viewed((4, 6, 3), Local(2), (4, 6, 1, 3), divided=2) == Local(2)
    assert viewed((4, 6, 3), Local(2), (4, 6, 1, 3), divided=3) == Local(3)


def test_view_of_a_whole_tensor_is_whole_and_keeps_dimensions_of_equal_values():
    assert viewed((4, 9), WHOLE, (6, 6)) == WHOLE
    assert viewed((4, 1, 3, 6), Local(same=frozenset({2})), (4, 3, 6)) == Local(same=frozenset({1}))
    assert viewed((4, 2, 3, 6), Local(same=frozenset({2})), (4, 6, 6)) == WHOLE
