"""Which sends are over once a receive is: by the order of the peer's actions alone."""

from panpipe.core.plan.lowering import lower
from panpipe.runtimes.engine.finished_sends import finished_sends

from ...support.plans import orders, plan_of


def told(plan, device):
    return {str(receive): sends for receive, sends in finished_sends(plan, lower(plan), device).items()}


def test_a_gradient_that_comes_back_tells_that_what_its_stage_read_before_has_arrived():
    """1F1B: device 1 reads microbatch 0, answers, reads microbatch 1, answers."""
    plan = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))
    assert told(plan, 0) == {"0RECV_B0<1": ((0, 1, 0),), "0RECV_B1<1": ((0, 1, 1),)}
    # Device 0 sends nothing behind a gradient: nothing tells that those have arrived, and the step's end waits.
    assert told(plan, 1) == {}


def test_an_answer_tells_of_all_that_was_read_before_it():
    """GPipe: device 1 has read both microbatches when it first answers."""
    plan = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), (0, 1))
    assert told(plan, 0) == {"0RECV_B0<1": ((0, 1, 0), (0, 1, 1))}


def test_a_weight_gradient_reads_no_message():
    """Split backward: stage 1's I reads what stage 2 sent, its W nothing more."""
    plan = plan_of(orders("0F0 2F0 2B0 0I0 0W0", "1F0 1I0 1W0"), (0, 1, 0))
    assert told(plan, 0) == {"2RECV_F0<1": ((0, 1, 0),), "0RECV_B0<1": ((2, 1, 0),)}
