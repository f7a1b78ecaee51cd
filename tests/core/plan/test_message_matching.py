"""The sends and receives of lists by hand: what is refused."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.validation.validate import validate

from ...support.plans import orders, plan_of

PLAN = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))
FIRST = "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0STEP"
SECOND = "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1STEP"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (FIRST.replace("0SEND_F1>1 ", ""), SECOND, "device 0 issues no 0SEND_F1>1: add it"),
        (FIRST, SECOND.replace("1RECV_F1<0 ", ""), "device 1 issues no 1RECV_F1<0: add it"),
        (FIRST.replace("0F0 ", "0F0 0SEND_F0>7 "), SECOND, "device 0 issues 0SEND_F0>7, which the plan does not have"),
        (FIRST.replace("0SEND_F1>1", "0SEND_F1>1 0SEND_F1>1"), SECOND, "0SEND_F1>1, .* or twice: remove it"),
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
    ],
)
def test_unmatched_messages_are_refused(first, second, message):
    with pytest.raises(RequestError, match=message):
        validate(PLAN, lowered=orders(first, second))
