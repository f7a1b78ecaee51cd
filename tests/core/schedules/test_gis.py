"""GIS as tables a person can read, its groups, and the backwards that it splits."""

from ...support.plans import table


def test_gis_of_two_devices_by_hand():
    # Four forwards before device 0's first backward, three before device 1's; every backward is I and then W.
    assert table("gis", 2, 4, 2) == [
        "0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3",
        "1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1F2 1I0 1W0 1F3 1I1 1W1 3F2 3I2 3W2 3F3 3I3 3W3 1I2 1W2 1I3 1W3",
    ]


def test_gis_h_has_groups_of_half_the_devices():
    assert table("gis-h", 2, 2, 2)[0] == "0F0 2F0 0F1 2I0 2W0 2F1 0I0 0W0 2I1 2W1 0I1 0W1"
    for devices, size in ((2, 1), (3, 2), (5, 3)):
        assert table("gis-h", devices, 7, 2) == table("gis", devices, 7, 2, group_size=size)
