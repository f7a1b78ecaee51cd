"""How far stages run ahead of their readers: two messages, more for farther readers, and never into a deadlock."""

from attrs import evolve
from panpipe.core.costs.costs import StageEdge
from panpipe.core.lowering.derive import forward_only
from panpipe.core.lowering.lowering import lower
from panpipe.core.validation.backpressure import choose_ahead_limit

from ...support.plans import orders, plan_of, scheduled


def limit_of(plan):
    return choose_ahead_limit(plan, lower(plan, 0))


def test_limit_is_two_messages_for_the_next_stage_and_one_more_for_each_stage_between():
    limit = limit_of(forward_only(scheduled("gpipe", 3, 8)))
    assert (limit(0, 1), limit(1, 2), limit(0, 2)) == (2, 2, 3)


def test_limit_of_few_microbatches_limits_nothing():
    plan = forward_only(scheduled("gpipe", 2, 1))
    assert limit_of(plan)(0, 1) >= plan.microbatches


def test_limit_is_doubled_while_it_deadlocks():
    """Device 2 posts the receives of stage 3 after 4F3, which needs 1F3, which comes after 0F5: with a limit of 4 (two,
    and two stages between) 0F4 would wait for the first of them for ever."""

    def row(*parts):
        return " ".join(f"{stage}F{m}" for stage, first, last in parts for m in range(first, last))

    plan = plan_of(
        orders(
            row((0, 0, 6), (1, 0, 4), (0, 6, 8), (1, 4, 8)), row((2, 0, 8)), row((4, 0, 4), (3, 0, 8), (4, 4, 8))
        ),
        (0, 0, 1, 2, 2),
        edges=[StageEdge(0, 3, 1, 0), StageEdge(1, 2, 1, 0), StageEdge(2, 4, 1, 0)],
    )  # fmt: skip
    limit = limit_of(evolve(plan, forward_only=True))
    assert (limit(0, 3), limit(1, 2)) == (6, 4)
