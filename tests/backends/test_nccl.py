"""The nccl backend without GPUs: the order of its operations, its communicators, and the bytes that it moves.

`blocking_host` follows NCCL's rules and is independent of validation. Ranks over gloo run the backend's own code.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.backends import nccl
from panpipe.backends.conformance import check
from panpipe.backends.nccl_transfers import batches
from panpipe.backends.registry import find_backend
from panpipe.core.actions import COMM_KINDS, RECV_KINDS, SEND_KINDS, Kind
from panpipe.core.errors import RequestError
from panpipe.core.lowering.lowering import lower
from panpipe.core.lowering.queues import sending_pairs
from panpipe.core.plan.plan import TiedWeight
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families

from ..support.backends.blocking_host import Operation, as_lowered, stuck, waits_at_all_but_sends, waits_at_receives
from ..support.backends.fake_nccl import OVER_GLOO, install
from ..support.launch import results
from ..support.parity import largest
from ..support.plans import plan_of

NAMES = sorted(families())


def plans(name, devices, microbatches):
    family = families()[name]
    for chunks in (1, 2, 3):
        try:
            schedule = family.build(ScheduleProblem(devices, microbatches, chunks))
        except RequestError:
            continue
        yield plan_of(schedule.device_actions, schedule.placement)


def issued_over_nccl(plan, lowered, fake):
    """What the backend issues when an executor calls it for these actions: it waits for what a compute action reads."""
    found = []
    for device, actions in enumerate(lowered):
        end = fake.end(range(plan.devices), device)
        end.connect(sending_pairs(plan))
        posted, own, handles, computed = {}, [], {}, 0
        fake.issued.clear()

        def note(posted=posted, own=own):
            for one in fake.issued:
                if one.kind == "receive":
                    own.append(posted[one.peer].pop(0))
            fake.issued.clear()

        for action in actions:
            if action.microbatch is None:
                continue
            if action.kind in COMM_KINDS:
                peer, tensor = plan.placement[action.peer], torch.zeros(1)
                if action.kind in SEND_KINDS:
                    end.send([tensor], peer)
                    own.append(Operation(action, computed))
                else:
                    posted.setdefault(peer, []).append(Operation(action, computed))
                    key = action.stage, action.microbatch, action.kind is Kind.RECV_F
                    handles.setdefault(key, []).append(end.receive([tensor], peer))
            else:
                if action.kind is not Kind.W:
                    for handle in handles.pop((action.stage, action.microbatch, action.kind is Kind.F), []):
                        handle.wait()
                note()
                own.append(Operation(action, computed))
                computed += 1
            note()
        assert not any(posted.values())
        end.close()
        found.append(own)
    return found


@pytest.fixture
def fake(monkeypatch):
    return install(monkeypatch)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(devices=st.integers(2, 5), microbatches=st.integers(1, 8), prefetch=st.integers(0, 4))
def test_one_communicator_per_ordered_pair_never_deadlocks(name, devices, microbatches, prefetch):
    for plan in plans(name, devices, microbatches):
        assert stuck(plan, as_lowered(plan, lower(plan, prefetch))) == []


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_a_host_that_waits_for_its_receives_hangs_if_they_are_issued_where_they_are_posted(name, prefetch):
    plan = next(plan for plan in plans(name, 4, 8) if name != "interleaved-1f1b" or len(plan.stages) > 4)
    assert stuck(plan, as_lowered(plan, lower(plan, prefetch)), waits_at_receives) != []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 5), (3, 3), (4, 8)])
def test_a_host_that_waits_for_every_receive_it_issued_does_not_hang_over_nccl(name, devices, microbatches, fake):
    for plan in plans(name, devices, microbatches):
        hosts = issued_over_nccl(plan, lower(plan), fake)
        assert stuck(plan, hosts, waits_at_receives) == []
        assert [[one.action for one in host] for host in hosts] == [
            [action for action in actions if action.microbatch is not None] for actions in lower(plan, 0)
        ]
        early = [one.ready < at for host in hosts for at, one in _receives(host)]
        assert any(early), "transfers wait for the event of their posting"


@pytest.mark.parametrize("waiting", [None, (0,), ()])
@pytest.mark.parametrize("name", NAMES)
def test_tensor_ranks_that_all_reduce_in_each_action_do_not_hang(name, waiting):
    """Also if the hosts of some of them wait, as those that load a kernel do, and those of others run ahead."""
    for plan in plans(name, 3, 4):
        hosts = as_lowered(plan, lower(plan, 0))
        assert stuck(plan, hosts, waits_at_all_but_sends, tensor_ranks=2, waiting=waiting) == []


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_one_tensor_rank_that_waits_too_early_stops_the_others(name):
    """The model has the rule that an action ends when all tensor ranks have started it."""
    plan = next(plans(name, 4, 8))
    hosts = as_lowered(plan, lower(plan, 1))
    assert stuck(plan, hosts, waits_at_receives, tensor_ranks=2, waiting=()) == []
    assert stuck(plan, hosts, waits_at_receives, tensor_ranks=2, waiting=(1,)) != []


@pytest.mark.parametrize(
    ("name", "hangs"), [("1f1b", False), ("zb-h1", False), ("interleaved-1f1b", True), ("zb-v", True)]
)
def test_a_host_that_also_waits_for_its_sends_hangs_by_some_schedules(name, hangs):
    """No order of issue helps against that: two devices may have sends in flight to each other. So all programs run
    before the first message, after which a host only waits for the whole device when its memory is exhausted."""
    plan = list(plans(name, 4, 8))[-1]
    hosts = as_lowered(plan, lower(plan, 0))
    assert (stuck(plan, hosts, waits_at_receives, whole_device=True) != []) == hangs


def _receives(host):
    """(compute actions issued before, receive)."""
    computed = 0
    for one in host:
        if one.action.kind in RECV_KINDS:
            yield computed, one
        computed += one.action.kind not in COMM_KINDS


def test_a_rank_has_communicators_for_the_pairs_of_its_plan_alone(fake):
    """64 ranks in one pipeline: two neighbours, two directions, and one communicator for sums."""
    (plan,) = list(plans("1f1b", 64, 64))[:1]
    counts = []
    for rank in range(64):
        end = fake.end(range(64), rank)
        end.connect(sending_pairs(plan))
        end.connect(sending_pairs(plan))  # the same again creates none
        counts.append(end.communicators)
        assert end.communicators == len(fake.communicators)
        end.close()
        assert fake.communicators == []
    assert counts == [3] + [5] * 62 + [3]


def test_communicators_of_16_stages_and_4_replicas(fake):
    """A rank has those of its pipeline, also for a weight tied between the ends, and one for sums over replicas."""
    (plan, *_) = plans("1f1b", 16, 16)
    plan = plan_of(plan.device_actions, plan.placement, tied=(TiedWeight("w", (0, 15), 8),), data=4)
    counts = {}
    for rank in range(64):
        replica, device = divmod(rank, 16)
        pipeline = fake.end(range(16 * replica, 16 * replica + 16), rank)
        replicas = fake.end(range(device, 64, 16), rank)
        pipeline.connect(sending_pairs(plan))
        counts[rank] = pipeline.communicators + replicas.communicators
        pipeline.close()
        replicas.close()
    assert set(counts.values()) == {6}
    assert fake.communicators == []


def test_a_pair_that_was_not_connected_is_refused(fake):
    end = fake.end(range(3), 0)
    end.connect([(0, 1), (1, 0), (1, 2)])
    with pytest.raises(RequestError, match=r"device 0 sends to device 2 over nccl, and connect\(\) did not name"):
        end.send([torch.zeros(1)], 2)


def test_more_communicators_than_streams_are_refused(fake):
    end = fake.end(range(64), 0)
    with pytest.raises(RequestError, match="needs 63 more NCCL communicators, 1 are open and PyTorch has streams for"):
        end.connect([(0, other) for other in range(1, 64)])


def test_the_tensors_of_a_plan_never_reach_nccl(fake):
    """NCCL's group calls record_stream on what it gets: messages pass through the slot of their pair."""
    end = fake.end(range(2), 0)
    end.connect([(0, 1), (1, 0)])
    fake.issued.clear()
    for size in (3, 70, 5, 70):
        end.send([torch.full((size,), 1.0), torch.zeros((), dtype=torch.bool)], 1).wait()
        end.receive([torch.zeros(size)], 1).wait()
    slots = {one.kind: one.tensor.untyped_storage().data_ptr() for one in fake.issued}
    assert len(set(slots.values())) == 2
    later = [one for one in fake.issued if one.tensor.numel() > 20]
    assert {one.tensor.untyped_storage().data_ptr() for one in later} == set(slots.values())


@given(sizes=st.lists(st.integers(0, 300), max_size=6), most=st.sampled_from([16, 64, 100]))
def test_batches_of_a_message_cover_every_byte_once_and_fit_into_a_slot(sizes, most):
    seen = [[0] * size for size in sizes]
    for batch in batches(sizes, most):
        assert batch
        assert all(piece.at % 16 == 0 and piece.start < piece.stop and piece.end <= most for piece in batch)
        assert all(a.end <= b.at for a, b in pairwise(batch))
        for piece in batch:
            for byte in range(piece.start, piece.stop):
                seen[piece.tensor][byte] += 1
    assert all(count == 1 for tensor in seen for count in tensor)


def test_nccl_over_gloo_conforms():
    check(OVER_GLOO, 3)


def test_ranks_train_over_the_nccl_backend_as_one_process_does(tmp_path):
    """Three ranks in a ring: every rank sends to the next one, and gradients to the one before."""
    for found in results("over_nccl", tmp_path, 3):
        assert found["distance"]["gradient"] < 1e-12
        assert found["distance"]["parameter"] < 1e-9
        assert found["communicators"] == 5
        later = found["shuffled"]
        assert later["before"][0].endswith(
            "; no parameter was updated, and gradients that waited for an update are dropped"
        )
        assert later["before"][1] == "nothing"
        for call in ("step", "evaluate", "save", "checkpoint", "state", "close"):
            assert "rank 1 has other values in batch['x'] than rank 0" in later[call][0]
            assert later[call][0].endswith("; updates were made with them: go on from a checkpoint")
            assert later[call][1] == "nothing" or call == "close"
        assert later["evaluated"].endswith("nothing was changed")


@pytest.mark.slow
def test_replicas_share_gradients_and_parameters_over_the_nccl_backend(tmp_path):
    for found in results("scattered_over_nccl", tmp_path, 4, MESH="pp=2,dp=2"):
        assert len(found) == 2 * 2
        assert all(largest(distances) < 1e-9 for distances in found.values())


def test_one_communicator_for_both_directions_deadlocks():
    """The reason for two communicators per pair; it also shows that the simulation can find a deadlock."""
    (plan,) = list(plans("1f1b", 2, 4))[:1]
    assert stuck(plan, as_lowered(plan, lower(plan, 2)), one_channel=True) != []


def test_nccl_limits_report_a_machine_with_one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "one GPU per rank and there is 1 GPU here" in nccl.limits()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert nccl.limits() is None


def test_ranks_that_share_a_gpu_are_refused_before_nccl_connects():
    nccl.refuse_shared(["GPU 0 of a", "GPU 1 of a", "GPU 0 of b"])
    with pytest.raises(RequestError, match=r"ranks 1 and 2 are both on GPU 1 of a: NCCL needs .*backend='gloo'"):
        nccl.refuse_shared(["GPU 0 of a", "GPU 1 of a", "GPU 1 of a"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_refused_with_its_reason():
    with pytest.raises(RequestError, match=r"backend 'nccl' cannot be used here: .*; usable are memcpy, gloo"):
        find_backend("nccl")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
def test_nccl_conforms():
    check(nccl.KIND, min(torch.cuda.device_count(), 3), where="cuda")
