"""The parameters and buffers of each process: the user's own, copies of tied ones, meta ones, those of others."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import TiedWeight
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.training.ownership import copy_tied_weights, install, own_tensors, release_others
from torch import nn

from ...support.plans import orders, plan_of

CPU = torch.device("cpu")


def stage(parameters=(), buffers=()):
    return SimpleNamespace(inputs=SimpleNamespace(parameters=tuple(parameters), buffers=tuple(buffers)))


def model():
    found = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    found[1].weight = found[0].bias  # tied
    return found


PROGRAMS = {1: stage(["0.bias", "1.bias"], ["1.running_mean"]), 0: stage(["0.weight", "0.bias"], ["1.running_mean"])}


def owned(of, where=None):
    return own_tensors(of, PROGRAMS, where or dict.fromkeys(PROGRAMS, CPU))


def test_first_stage_has_the_users_tensor_and_later_ones_a_copy():
    user = model()
    found = owned(user)
    assert found.parameters[0]["0.bias"] is user[0].bias
    copy = found.parameters[1]["0.bias"]
    assert copy is not user[0].bias
    assert torch.equal(copy, user[0].bias)
    assert copy.data_ptr() != user[0].bias.data_ptr()
    assert copy.requires_grad
    assert found.parameters[1]["1.bias"] is user[1].bias
    assert found.without_memory == []
    assert found.held["0.bias"] is user[0].bias
    assert set(found.held) == {"0.weight", "0.bias", "1.bias", "1.running_mean"}


def test_stages_on_one_device_share_a_buffer():
    user = model()
    found = owned(user)
    assert found.buffers[0]["1.running_mean"] is found.buffers[1]["1.running_mean"] is user[1].running_mean
    assert found.copies == ()


def test_buffer_on_two_devices_has_a_copy_that_is_filled():
    user = model()
    programs = {index: stage([], each.inputs.buffers) for index, each in PROGRAMS.items()}
    found = own_tensors(user, programs, {0: CPU, 1: torch.device("meta")})
    ((copy, original),) = found.copies
    assert copy.is_meta
    assert original is found.buffers[0]["1.running_mean"] is user[1].running_mean
    assert found.buffers[1]["1.running_mean"] is copy
    one, other = torch.zeros(2), torch.ones(2)
    type(found)({}, {}, {}, (), ((one, other),)).copy_buffers()
    assert one.tolist() == [1, 1]


def test_tensors_on_meta_get_memory_later():
    with torch.device("meta"):
        user = model()
    user[0].weight.requires_grad_(False)
    found = owned(user)
    assert set(found.unallocated) == {"0.weight", "0.bias", "1.bias", "1.running_mean"}
    assert [each is found.parameters[1]["0.bias"] for each in found.tied_copies] == [True]
    assert len(found.without_memory) == 5
    assert all(each.device == CPU for each in found.without_memory)
    assert not found.parameters[0]["0.weight"].requires_grad
    install(user, found.unallocated)
    own = found.parameters[0]  # not printed by an assertion: they have no memory
    installed = [user[0].weight is own["0.weight"], user[0].bias is own["0.bias"], user[1].weight is own["0.bias"]]
    assert installed == [True] * 3
    assert user[1].running_var.is_meta  # not among them


def test_tensors_of_other_ranks_cannot_be_read():
    user = model()
    weight, mean, variance = user[0].weight, user[1].running_mean, user[1].running_var
    release_others(user, {"0.bias"}, frozenset({"1.running_mean"}), {"0.weight": "rank 3"})
    assert user[0].bias is user[1].weight
    assert not user[0].bias.is_meta
    assert user[0].weight.is_meta
    assert user[1].running_mean.is_meta
    assert user[1].running_var is variance
    assert not variance.is_meta
    for tensor in (user[0].weight, weight):
        with pytest.raises(RequestError, match=r"'0\.weight'.*rank 3"):
            tensor + 1
    with pytest.raises(RequestError, match=r"1\.running_mean.*another rank"):
        mean + 1


def test_tied_weights_get_the_value_of_the_first_stage():
    tied = (TiedWeight("w", (0, 1, 2), 16), TiedWeight("v", (1, 2), 4))
    plan = plan_of(orders("0F0 2F0 2B0 0B0", "1F0 1B0"), (0, 1, 0), tied=tied)
    own = {index: {"w": nn.Parameter(torch.full((2, 2), float(index + 5)).t()), "v": nn.Parameter(torch.ones(1))}
           for index in range(3)}  # fmt: skip
    team = ThreadTeam(2)
    try:
        with torch.no_grad():
            copy_tied_weights(plan, own, team)
    finally:
        team.close()
    assert [own[index]["w"].flatten().tolist() for index in range(3)] == [[5.0] * 4] * 3
