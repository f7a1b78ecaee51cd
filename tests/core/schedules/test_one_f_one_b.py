"""1F1B, as tables a person can read."""

import pytest
from panpipe.core.errors import RequestError

from ...support.plans import table


def test_1f1b_orders_equal_the_published_table():
    assert table("1f1b", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_with_fewer_microbatches_than_devices():
    assert table("1f1b", 3, 1) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]


def test_1f1b_with_chunks_is_refused():
    with pytest.raises(RequestError, match="chunks is 2: 1f1b has one stage"):
        table("1f1b", 2, 4, 2)
