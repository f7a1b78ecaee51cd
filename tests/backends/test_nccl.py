"""NCCL's order of operations: no plan deadlocks with a communicator for each ordered pair.

The simulation follows NCCL's rules and is independent of validation: a rank's host issues its actions without waiting
for a device; each stream runs its operations in order; a communicator runs its operations in the order of issue, and a
started operation ends when its counterpart has started, too.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.backends import nccl
from panpipe.backends.conformance import check
from panpipe.backends.registry import find_backend
from panpipe.core.actions import COMM_KINDS, SEND_KINDS, Kind
from panpipe.core.errors import RequestError
from panpipe.core.plan.lowering import lower
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families

from ..support.plans import plan_of


def stuck(plan, lowered, communicator):
    """Actions that never end; empty if the step completes.

    Args:
        communicator: (sender, receiver) → the communicator of their messages.
    """
    place, readers, queues, order = plan.placement, {}, {}, []
    for device, actions in enumerate(lowered):
        arrived = {}
        last = None  # the last action issued to the compute stream
        for action in actions:
            if action.kind in COMM_KINDS:
                sends = action.kind in SEND_KINDS
                peer = place[action.peer]
                pair = (device, peer) if sends else (peer, device)
                queues.setdefault((device, communicator(*pair)), []).append(action)
                readers[device, action] = [] if last is None else [(device, last)]
                if not sends:
                    arrived.setdefault((action.stage, action.microbatch, action.kind is Kind.RECV_F), []).append(action)
            else:
                messages = [] if action.kind is Kind.W else arrived.pop(
                    (action.stage, action.microbatch, action.kind is Kind.F), []
                )  # fmt: skip
                readers[device, action] = [(device, one) for one in messages]
                queues.setdefault((device, "compute"), []).append(action)
                last = action
            order.append((device, action))
    done = set()
    while True:
        before = len(done)
        heads = {
            (device, queue[0])
            for (device, _), queue in queues.items()
            if queue and all(one in done for one in readers[device, queue[0]])
        }
        for (device, _), queue in queues.items():
            if not queue or (device, queue[0]) not in heads:
                continue
            action = queue[0]
            if action.kind in COMM_KINDS and (place[action.peer], action.counterpart) not in heads | done:
                continue
            done.add((device, action))
        for (device, _), queue in queues.items():
            while queue and (device, queue[0]) in done:
                queue.pop(0)
        if len(done) == before:
            return [one for one in order if one not in done]


def plans(name, devices, microbatches, prefetch):
    family = families()[name]
    for chunks in (1, 2, 3):
        try:
            schedule = family.build(ScheduleProblem(devices, microbatches, chunks))
        except RequestError:
            continue
        plan = plan_of(schedule.device_actions, schedule.placement)
        yield plan, lower(plan, prefetch)


@pytest.mark.parametrize("name", sorted(families()))
@settings(max_examples=6)
@given(devices=st.integers(2, 5), microbatches=st.integers(1, 8), prefetch=st.integers(0, 4))
def test_one_communicator_per_ordered_pair_never_deadlocks(name, devices, microbatches, prefetch):
    for plan, lowered in plans(name, devices, microbatches, prefetch):
        assert stuck(plan, lowered, lambda sender, receiver: (sender, receiver)) == []


def test_one_communicator_for_both_directions_deadlocks():
    """The reason for two communicators per pair; it also shows that the simulation can find a deadlock."""
    ((plan, lowered),) = list(plans("1f1b", 2, 4, 2))[:1]
    assert stuck(plan, lowered, lambda a, b: (min(a, b), max(a, b))) != []


def test_all_ranks_create_communicators_in_one_order():
    assert nccl.communicators(3) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


def test_no_two_communicators_of_a_rank_share_a_stream():
    """Communicators of a pipeline of four devices and of its two replicas."""
    pipeline, replicas = [0, 1, 2, 3], [1, 5]
    groups = [(pipeline, pair) for pair in nccl.communicators(4) if 1 in pair] + [(pipeline, None)]
    groups += [(replicas, pair) for pair in nccl.communicators(2)] + [(replicas, None)]
    assert len({nccl.stream_name(*group) for group in groups}) == len(groups) == 10


def test_nccl_limits_report_a_machine_with_one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "one GPU per rank and there is 1 GPU here" in nccl.limits()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert nccl.limits() is None


def test_bytes_of_a_contiguous_tensor_share_its_memory():
    scalar, odd = torch.tensor(1.5, dtype=torch.float64), torch.arange(6).view(2, 3).t()
    assert nccl._bytes_of(scalar).data_ptr() == scalar.data_ptr()
    assert nccl._bytes_of(scalar).view(torch.float64).item() == 1.5
    assert nccl._bytes_of(odd).view(torch.int64).tolist() == [0, 3, 1, 4, 2, 5]
    assert nccl._bytes_of(torch.empty(0)).numel() == 0


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
