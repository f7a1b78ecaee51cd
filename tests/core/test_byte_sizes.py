"""Sizes in bytes, with and without units."""

import pytest
from panpipe.core.arguments import byte_size
from panpipe.core.errors import RequestError


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, None), (20, 20), ("20", 20), ("2e3", 2000), (1.5, 1.5), ("80GB", 80_000_000_000), ("16 GiB", 16 << 30),
        ("1.5mb", 1_500_000), ("512KB", 512_000), ("3tib", 3 << 40), ("7B", 7),
    ],
)  # fmt: skip
def test_a_size_is_read_with_and_without_a_unit(given, wanted):
    assert byte_size("limit", given) == wanted


@pytest.mark.parametrize("given", ["", "GB", "20XB", "1.2.3GB", "-1", -1, "nan", "1e999", True, [], "20 GB of it"])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(RequestError, match=r"limit is .*give bytes"):
        byte_size("limit", given)


def test_a_number_without_its_unit_is_refused_where_a_model_has_to_fit():
    with pytest.raises(RequestError, match="limit is 20 bytes, in which no model fits: give the unit, too, as in 20GB"):
        byte_size("limit", "20", model=True)
    assert byte_size("limit", "20B", model=True) == 20
