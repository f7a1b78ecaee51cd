"""The user's ``batch_dims``: a prefix of the batch, and what does not fit it."""

from typing import Any

import pytest
import torch
from panpipe.core.capture.batch.batch_dims import read_batch_dims
from panpipe.core.errors import RequestError

N, S, D = 8, 6, 8
LABELS = torch.zeros(N, dtype=torch.long)
BATCH = {"x": torch.randn(S, N, D), "y": torch.zeros(N), "deep": {"z": torch.zeros(N, S)}, "list": [LABELS, LABELS]}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (0, {"x": 0, "y": 0, "deep']['z": 0}),
        ({"x": 1, "y": None, "deep": -2}, {"x": 1, "y": None, "deep']['z": 0}),
        ({"deep": {"z": -1}}, {"deep']['z": 1}),
        ({"x": "auto", "y": 0}, {"y": 0}),
        ("auto", {}),
    ],
)
def test_dimensions_are_given_as_a_prefix(given: Any, wanted: dict[str, Any]) -> None:
    found = read_batch_dims(given, BATCH).by_name
    assert {name: dim for name, dim in found.items() if "list" not in name} == {
        f"batch['{key}']": dim for key, dim in wanted.items()
    }


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"x": 3}, r"3 for batch\['x'\], which is a tensor of shape 6×8×8: give a dimension from -3 to 2"),
        ({"other": 0}, r"batch_dims has batch\['other'\], and batch has batch\['x'\], batch\['y'\]"),
        ([0, 0], r"batch_dims has batch\[0\]"),
        ({"list": [0]}, r"1 entries for batch\['list'\]"),
        ({"x": {"a": 0}}, r"which is a tensor of shape 6×8×8: give a dimension or None"),
        ({"x": "samples"}, "for a list with an element for each sample"),
        ("rows", "give a dimension, None, or 'samples'"),
        (1.5, "give a dimension, None"),
        (True, "give a dimension, None"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        read_batch_dims(given, BATCH)
    assert "\n" not in str(refused.value)
