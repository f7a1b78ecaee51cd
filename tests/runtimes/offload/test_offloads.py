"""The arenas of this process's devices before the first step: who gets one, and what a host has no memory for."""

import os
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from panpipe.core.errors import RequestError
from panpipe.core.policies.offload import host_slots
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.offload import offloads as module
from panpipe.runtimes.offload.offloads import offloads, usable_bytes
from panpipe.runtimes.offload.tier import OffloadTier
from panpipe.runtimes.programs.compiled import compile_stages

from ...support.cuts import captured_once, even_plan, programs_of
from ...support.models import CASES
from ...support.offloading import all_away

CASE, F32 = CASES["batchnorm with a skip"], torch.float32
CPU = {device: torch.device("cpu") for device in range(2)}


@pytest.fixture(scope="module")
def given():
    """A plan, the same with everything away that may be, and its programs."""
    operators = captured_once(CASE, F32, 8, 4)
    plan = even_plan(operators, 2, 4)
    stages = [stage.nodes for stage in plan.stages]
    compiled = compile_stages(operators, stages, range(2), CPU, known=programs_of(CASE, F32, 8, 4, "cpu"))
    return plan, all_away(plan, operators), compiled


@pytest.fixture
def team():
    team = ThreadTeam(2)
    yield team
    team.close()


def test_plan_without_offload_has_no_arena(given, team):
    plan, _, compiled = given
    assert offloads(plan, compiled, team, CPU, OffloadTier()) == {}


def test_each_device_has_an_arena_of_the_size_of_its_slots(given, team):
    _, away, compiled = given
    found = offloads(away, compiled, team, CPU, OffloadTier())
    assert set(found) == {0, 1}
    assert host_slots(away, 0).bytes > 0
    for device, offload in found.items():
        assert offload.memory.bytes == host_slots(away, device).bytes
        offload.memory.close()


def test_device_without_stages_that_offload_reserves_nothing(given, team):
    _, away, compiled = given
    first = tuple(each for each in away.memory.offload if away.placement[each.stage] == 0)
    found = offloads(evolve(away, memory=evolve(away.memory, offload=first)), compiled, team, CPU, OffloadTier())
    assert found[0].memory.bytes == host_slots(away, 0).bytes
    assert found[1].memory.bytes == 0
    for offload in found.values():
        offload.memory.close()


def test_arenas_that_one_host_has_no_memory_for_are_refused_with_their_sum(given, team):
    _, away, compiled = given
    asked = sum(host_slots(away, device).bytes for device in range(2))
    with pytest.raises(RequestError, match=rf"of {asked} bytes to host '.*', and {asked - 1} bytes may be used there"):
        offloads(away, compiled, team, CPU, OffloadTier(host_memory=asked - 1))


def test_saved_tensors_of_a_gpu_do_not_go_to_a_file(given, team, tmp_path):
    _, away, compiled = given
    with pytest.raises(RequestError, match=r"offload_to is .* and a device of the pipeline is cuda:0: saved tensors"):
        offloads(away, compiled, team, {**CPU, 1: torch.device("cuda:0")}, OffloadTier(str(tmp_path)))


def test_memory_that_was_reserved_is_freed_if_another_device_fails(given, team, monkeypatch):
    _, away, compiled = given
    closed = []

    class Memory:
        def __init__(self, tier, where, device, *, separate):
            self.device = device

        def reserve(self, size):
            if self.device == 1:
                raise MemoryError("no memory left")

        def close(self):
            closed.append(self.device)

    monkeypatch.setattr(module, "HostMemory", Memory)
    with pytest.raises(MemoryError, match="no memory left"):
        offloads(away, compiled, team, CPU, OffloadTier())
    assert closed == [0, 1]


@pytest.mark.parametrize(
    ("own", "container", "left", "wanted"),
    [
        (5, 7, 6, (5, "host_memory")),
        (None, 7, 6, (6, "ulimit -d")),
        (None, 7, None, (7, "the container's memory limit")),
        (None, None, None, (9, "the machine's memory")),
    ],
)
def test_smallest_limit_on_a_hosts_memory_counts(monkeypatch, own, container, left, wanted):
    for name, value in (("container_bytes", container), ("bytes_left", left), ("physical_bytes", 9)):
        monkeypatch.setattr(module, name, lambda value=value: value)
    assert usable_bytes(OffloadTier(host_memory=own)) == wanted


def test_free_space_of_the_files_folder_is_its_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=3, f_frsize=4096))
    assert usable_bytes(OffloadTier(str(tmp_path))) == (3 * 4096, f"free space of {tmp_path}")
