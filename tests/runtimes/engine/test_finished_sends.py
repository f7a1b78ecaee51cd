"""Which sends have ended when a receive has arrived, from the order of the peer's actions."""

from panpipe.core.plan.lowering import lower
from panpipe.runtimes.engine.finished_sends import finished_sends

from ...support.plans import orders, plan_of


def finished(plan, device):
    return {str(receive): sends for receive, sends in finished_sends(plan, lower(plan), device).items()}


def test_received_gradient_proves_that_the_send_its_stage_read_has_ended():
    """1F1B: device 1 reads microbatch 0, sends its gradient, reads microbatch 1, sends its gradient."""
    plan = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))
    assert finished(plan, 0) == {"0RECV_B0<1": ((0, 1, 0),), "0RECV_B1<1": ((0, 1, 1),)}
    # Device 0 sends nothing after a gradient: nothing proves that the gradients arrived, and the end of the step waits.
    assert finished(plan, 1) == {}


def test_received_gradient_proves_the_end_of_all_sends_read_before_it():
    """GPipe: device 1 has read both microbatches when it sends the first gradient."""
    plan = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), (0, 1))
    assert finished(plan, 0) == {"0RECV_B0<1": ((0, 1, 0), (0, 1, 1))}


def test_weight_backward_reads_no_message():
    """Split backward: stage 1's I reads what stage 2 sent, its W nothing more."""
    plan = plan_of(orders("0F0 2F0 2B0 0I0 0W0", "1F0 1I0 1W0"), (0, 1, 0))
    assert finished(plan, 0) == {"2RECV_F0<1": ((0, 1, 0),), "0RECV_B0<1": ((2, 1, 0),)}
