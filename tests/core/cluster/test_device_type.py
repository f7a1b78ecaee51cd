"""Types of devices: what their numbers must be, and where each comes from."""

import pytest
from attrs import evolve
from panpipe.core.cluster.catalog import find_device
from panpipe.core.cluster.device_type import COMPUTE_KINDS, MEMORY_KINDS
from panpipe.core.cluster.sourced import Source
from panpipe.core.errors import RequestError

GPU = find_device("A100-80GB")
SOURCE = Source("a test")


def test_every_number_has_a_source_and_usable_memory_leaves_the_reserve():
    names = [name for name, _ in GPU.numbers()]
    assert len(set(names)) == len(names)
    assert set(names) <= set(GPU.sources)
    assert {f"efficiency.{kind}" for kind in (*COMPUTE_KINDS, *MEMORY_KINDS)} <= set(names)
    assert GPU.usable_bytes == GPU.memory_bytes - GPU.reserve_bytes


def changed(mapping, **changes):
    return {**mapping, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_bytes": 0}, "memory_bytes of device '.*' is 0: it must be a finite number above 0"),
        ({"peak_memory_bytes_per_s": float("inf")}, "is inf: it must be a finite number above 0"),
        ({"launch_overhead_s": -1.0}, "launch_overhead_s of .* is -1.0: it must be a finite number at least 0"),
        ({"sources": {}}, "has no source: say where"),
        ({"efficiency": {"matmul": 0.5}}, "efficiency of device '.*' has keys matmul: give one for each of"),
        ({"efficiency": changed(GPU.efficiency, matmul=1.5)}, r"efficiency\.matmul of .* is 1\.5: a fraction"),
        ({"peak_flops_per_s": {}}, "peak_flops_per_s of device '.*' is for nothing"),
        ({"multiprocessors": 0}, "multiprocessors of device '.*' is 0: it must be a finite number above 0"),
        ({"effective_memory_bytes_per_s": 2 * GPU.peak_memory_bytes_per_s}, "above its peak of"),
        (
            {"step_error": 1.0, "sources": changed(GPU.sources, step_error=SOURCE)},
            "step_error of .* is 1.0: a share below",
        ),
        ({"reserve_bytes": GPU.memory_bytes}, "reserves .* of its .* bytes: leave some"),
    ],
)
def test_numbers_out_of_their_range_are_refused_in_one_line(changes, said):
    with pytest.raises(RequestError, match=said) as error:
        evolve(GPU, **changes)
    assert "\n" not in str(error.value)


def test_number_type_that_is_unknown_is_refused():
    rates = changed(GPU.peak_flops_per_s, int3=1.0)
    sources = changed(GPU.sources, **{"peak_flops_per_s.int3": next(iter(GPU.sources.values()))})
    with pytest.raises(RequestError, match=r"peak_flops_per_s of device '.*' is for int3: give it for some of"):
        evolve(GPU, peak_flops_per_s=rates, sources=sources)


def test_nothing_may_be_reserved_and_an_operator_may_take_no_time():
    free = evolve(GPU, reserve_bytes=0, launch_overhead_s=0.0)
    assert free.usable_bytes == free.memory_bytes
