"""GPipe, as tables a person can read."""

from ...support.plans import table


def test_gpipe_orders_equal_its_published_table():
    assert table("gpipe", 2, 3) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_gpipe_with_chunks_is_breadth_first():
    assert table("gpipe", 2, 2, 2) == ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"]
