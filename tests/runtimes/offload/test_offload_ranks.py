"""Ranks over gloo whose saved tensors leave: the same bits, and all of them stop when a file is full."""

import pytest
import torch
from panpipe.runtimes.launch.team import ThreadTeam

from ...support.launch import alone, results
from ...support.parity import build
from ...support.programs.offload_features import FEATURES, check


def test_two_ranks_have_the_same_bits_with_offload_to_the_host_and_to_a_file(tmp_path):
    for found in results("offloading", tmp_path):
        for plain, host, file in found.values():
            assert plain == host == file
            assert len(plain) > 2


def test_a_full_disk_ends_all_ranks_with_its_name_and_leaves_the_checkpoint(tmp_path):
    left, stopped = alone("full_disk", tmp_path)
    assert (left.returncode, stopped.returncode) == (1, 1)
    full = f"OSError: [Errno 27] File too large: 'file of saved tensors in {tmp_path}'"
    assert f"rank 1 stopped: OffloadError: offload of saved tensors failed: {full}" in left.stderr
    assert full in stopped.stderr
    pipe = build(ThreadTeam(2), "tied gpt with dropout", torch.float32, 12, None, 6)
    pipe.resume(tmp_path / "checkpoint")
    assert pipe.metrics.steps == 1
    pipe.close()


@pytest.mark.slow
def test_replicas_that_share_have_the_same_bits_with_offload(tmp_path):
    first, second = results("offloading_replicas", tmp_path, MESH="dp=2,pp=1")
    check(first)
    check(second)
    assert len(first) == 2


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2,pp=1", "pp=2,dp=2"])
def test_features_have_the_same_bits_with_offload_over_ranks(tmp_path, mesh):
    for found in results("offloading_features", tmp_path, 4 if mesh == "pp=2,dp=2" else 2, MESH=mesh):
        check(found)
        assert len(found) >= len(FEATURES)
