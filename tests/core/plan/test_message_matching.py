"""Every way in which the sends and receives of lowered lists do not match is refused."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.lowering.queues import queues_of

from ...support.plans import orders, plan_of

PLAN = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))
FIRST = "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0STEP"
SECOND = "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1STEP"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (FIRST.replace("0SEND_F1>1 ", ""), SECOND, r"1RECV_F1<0 has no counterpart"),
        (FIRST, SECOND.replace("1RECV_F1<0 ", ""), r"0SEND_F1>1 has no counterpart"),
        (
            FIRST,
            SECOND.replace("1RECV_F1<0 ", "").replace("1RECV_F0<0", "1RECV_F1<0 1RECV_F0<0"),
            r"message 0 from device 0 to 1 is 0SEND_F0>1 at the sender and 1RECV_F1<0 at the receiver",
        ),
        (
            "0SEND_F0>1 " + FIRST.replace("0SEND_F0>1 ", ""),
            SECOND,
            r"0SEND_F0>1 is before the action that computes its tensors",
        ),
        (
            FIRST,
            SECOND.replace("1RECV_F1<0 1F1", "1F1 1RECV_F1<0"),
            r"1RECV_F1<0 is after the action that reads it: move it before stage 1's F of microbatch 1",
        ),
        (FIRST.replace("0F0 ", "0F0 0SEND_F0 "), SECOND, r"0SEND_F0 on device 0 names no pair of stages"),
        (FIRST.replace("0F0 ", "0F0 0SEND_F0>7 "), SECOND, r"0SEND_F0>7 on device 0 names no pair of stages"),
        (FIRST.replace("0F0 ", "0F0 1SEND_B0>0 "), SECOND, r"1SEND_B0>0 is issued by device 0, and stage 1 is on"),
        (FIRST.replace("0F0 ", "0F0 0SEND_F0>0 "), SECOND, r"stages of one device do not communicate"),
        (
            FIRST.replace("0SEND_F1>1 ", "").replace("0RECV_B1<1 ", ""),
            SECOND.replace("1RECV_F1<0 ", "").replace("1SEND_B1>0 ", ""),
            r"0SEND_F1>1 is missing: stage 1 reads it",
        ),
        (
            FIRST.replace("0SEND_F1>1", "0SEND_F1>1 0SEND_F1>1"),
            SECOND.replace("1RECV_F1<0", "1RECV_F1<0 1RECV_F1<0"),
            r"0SEND_F1>1 is sent twice",
        ),
        (
            FIRST.replace("0B0 ", "0B0 0SEND_B0>1 "),
            SECOND.replace("1STEP", "1RECV_B0<0 1STEP"),
            r"0SEND_B0>1 has no edge in the plan",
        ),
    ],
)
def test_unmatched_messages_are_refused(first, second, message):
    with pytest.raises(RequestError, match=message):
        queues_of(PLAN, orders(first, second))
