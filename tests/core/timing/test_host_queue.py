"""Host-copy queues in the evaluation: what waits for a copy, and what is away meanwhile."""

from panpipe.core.actions import parse_action
from panpipe.core.costs.costs import StageCosts
from panpipe.core.plan.memory import bytes_off_device
from panpipe.core.plan.memory_policy import TimedCopy
from panpipe.core.timing.orders import evaluate

COSTS = [StageCosts(1, 1, 1, saved_bytes=4)]
ORDER = ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]  # F takes 1, B takes 2: ends 1 2 3 5 7 9


def run(order=ORDER, copies=(), queues=1):
    actions = [[parse_action(text) for text in order]]
    return evaluate(actions, [0], COSTS, copies=[list(copies)], host_queues=queues)


def copy(forward, freed_at, reload_after, reader, out=1.0, back=1.0, size=4.0):
    return TimedCopy(forward, freed_at, reload_after, reader, out, back, size)


def test_without_copies_all_microbatches_are_held():
    assert run().peak_memory == (12,)
    assert run().makespan == 9


def test_copies_in_time_cost_nothing_and_free_memory():
    found = run(copies=[copy(1, 3, 3, 4, back=0.0), copy(2, 4, 4, 5, back=0.0)])
    assert found.makespan == 9
    # While 0B0 runs microbatch 1 is away, while 0B1 runs microbatch 2; the peak is before that.
    assert found.peak_memory == (12,)
    assert bytes_off_device([copy(1, 3, 3, 4), copy(2, 4, 4, 5)], 6) == [(0, 0), (0, 0), (0, 0), (4, 0), (4, 0), (0, 0)]


def test_action_waits_for_the_copy_out_whose_memory_it_needs():
    # 0F1 starts when microbatch 0 has left, at 1 + 3; then the reload delays nothing.
    found = run(copies=[copy(0, 1, 1, 3, out=3.0, back=0.5)])
    assert found.starts[0] == (0, 4, 5, 6, 8, 10)
    assert found.peak_memory == (12,)


def test_backward_waits_for_the_copy_back():
    found = run(copies=[copy(0, 2, 2, 3, out=1.0, back=2.5)])
    assert found.starts[0][3] == 3 + 2.5


def test_both_directions_share_one_queue_or_have_their_own():
    # At the end of 0F2 (3) the copy out of microbatch 1 runs until 5; the reload of microbatch 0 takes 3.
    copies = [copy(0, 2, 2, 3, out=1.0, back=3.0), copy(1, 4, 4, 5, out=3.0, back=0.0)]
    assert run(copies=copies).starts[0][3] == 5 + 3
    assert run(copies=copies, queues=2).starts[0][3] == 3 + 3


def test_reloads_are_issued_before_offloads_at_one_position():
    copies = [copy(0, 1, 2, 3, out=1.0, back=1.0), copy(2, 4, 4, 5, out=5.0, back=0.0)]
    # The reload of microbatch 0 after 0F2 goes before the copy out of microbatch 2, which takes 5.
    assert run(copies=copies).starts[0][3] == 5.0


def test_what_is_away_between_two_actions_counts_where_i_creates_memory():
    assert bytes_off_device([copy(0, 1, 3, 5, size=2)], 6) == [(0, 0), (2, 2), (2, 2), (2, 0), (0, 0), (0, 0)]
