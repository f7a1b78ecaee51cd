"""Meshes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.cluster.mesh import Mesh, parse_mesh
from panpipe.core.errors import RequestError


@pytest.mark.parametrize(
    ("text", "devices", "mesh"),
    [
        ("pp=4", 4, Mesh(4)),
        ("pp=4", None, Mesh(4)),
        ("dp=1", None, Mesh(2)),
        ("pp=2,dp=2", 4, Mesh(2, 2, ((0, 2), (1, 3)))),
        ("dp=2,pp=2", 4, Mesh(2, 2)),
        ("dp=2, pp=4", 8, Mesh(4, 2)),
        ("pp=4,dp=2", 8, Mesh(4, 2, ((0, 2, 4, 6), (1, 3, 5, 7)))),
        ("dp=3", 6, Mesh(2, 3, ((0, 3), (1, 4), (2, 5)))),
        ("pp=1,dp=3", 3, Mesh(1, 3)),
    ],
)
def test_the_last_dimension_has_neighbouring_devices(text, devices, mesh):
    assert parse_mesh(text).over(devices) == mesh


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("four", "'four' is not a mesh: write"),
        ("pp=", "'pp=' is not a mesh"),
        ("pp=-1", "'pp=-1' is not a mesh"),
        (f"pp={'9' * 5000}", "is not a mesh: write its dimensions"),
        ("pp=2,dp=0", "has dp=0: give every dimension once, at least 1"),
        ("pp=2,pp=2", "has pp twice"),
        ("pp=2,tp=2", "a dimension 'tp': the dimensions are pp .the pipeline. and dp"),
    ],
)
def test_invalid_mesh_is_refused_in_one_line(text, said):
    with pytest.raises(RequestError, match=said) as refusal:
        parse_mesh(text)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pp=2,dp=2", "is for 4 devices and there are 6 ranks: .* such as pp=3,dp=2, or 4 ranks"),
        ("pp=4", "is for 4 devices and there are 6 ranks: .* such as pp=6, or 4 ranks"),
        ("dp=4", "is for 4 devices and there are 6 ranks: .* such as pp=6"),
        ("dp=7", "is for 7 devices and there are 6 ranks"),
    ],
)
def test_mesh_for_another_number_of_devices_is_refused_with_both_numbers(text, said):
    with pytest.raises(RequestError, match=said):
        parse_mesh(text).over(6, "ranks")


@given(st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_every_device_has_one_place(pipeline, data, pipeline_last):
    text = f"dp={data},pp={pipeline}" if pipeline_last else f"pp={pipeline},dp={data}"
    mesh = parse_mesh(text).over(pipeline * data)
    mesh.check()
    places = [mesh.place(device) for device in range(mesh.ranks)]
    assert sorted(places) == [(r, p) for r in range(data) for p in range(pipeline)]
    for device, (replica, position) in enumerate(places):
        assert device == (replica * pipeline + position if pipeline_last else position * data + replica)
