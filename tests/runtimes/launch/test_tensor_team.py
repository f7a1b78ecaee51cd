"""Parts of tensors that tensor ranks divide."""

import pytest
import torch
from panpipe.runtimes.launch.tensor_team import Split


@pytest.mark.parametrize(
    ("dim", "parts", "whole", "shape"),
    [
        (0, 2, (4, 3), (2, 3)), (1, 3, (4, 3), (4, 1)), (1, 2, (4, 3), None), (2, 2, (4, 3), None), (0, 1, (5,), (5,)),
        (0, 2, (), None),
    ],
)  # fmt: skip
def test_part_has_a_share_of_its_dimension(dim, parts, whole, shape):
    assert Split(dim, 0, parts).part_shape(whole) == shape


def test_parts_of_all_ranks_are_the_whole():
    whole = torch.arange(12).view(2, 6)
    parts = [Split(1, rank, 3).part_of(whole) for rank in range(3)]
    assert parts[1].tolist() == [[2, 3], [8, 9]]
    assert torch.equal(torch.cat(parts, 1), whole)
    parts[0].zero_()
    assert whole[0, :2].tolist() == [0, 0]  # a view
