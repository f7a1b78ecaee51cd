"""Actions and their text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.actions import COMM_KINDS, SEND_KINDS, Action, known_kinds, parse_action
from panpipe.core.errors import RequestError


def actions():
    number = st.integers(0, 10**6)

    def of(kind):
        microbatch = st.one_of(st.none(), number) if kind.whole_step is None else number
        microbatch = st.none() if kind.whole_step else microbatch
        peer = number if kind in COMM_KINDS else st.none()
        return st.builds(Action, number, st.just(kind), microbatch, peer)

    return st.sampled_from(known_kinds()).flatmap(of)


@given(actions())
def test_parse_action_is_the_inverse_of_str(action):
    assert parse_action(str(action)) == action


@given(actions().filter(lambda action: action.peer is not None))
def test_send_and_its_receive_are_each_other_s_counterpart(action):
    other = action.counterpart
    assert other.counterpart == action
    assert (other.kind in SEND_KINDS) != (action.kind in SEND_KINDS)
    assert (other.stage, other.peer, other.microbatch) == (action.peer, action.stage, action.microbatch)
    assert other.kind.value[-1] == action.kind.value[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1F0junk", "'1F0junk' is not an action: write <stage><kind><microbatch>"),
        ("", "'' is not an action"),
        ("F0", "'F0' is not an action"),
        ("-1F0", "'-1F0' is not an action"),
        ("1X0", "'1X0' is not an action"),
        ("1F", "'1F' is not an action: F needs a microbatch"),
        ("1STEP0", "'1STEP0' is not an action: STEP takes no microbatch"),
        ("1F0>2", "'1F0>2' is not an action: a send names its peer stage after"),
        ("1SEND_F0<2", "'1SEND_F0<2' is not an action: a send names its peer stage after"),
        ("1RECV_B0>2", "'1RECV_B0>2' is not an action: a send names its peer stage after"),
    ],
)
def test_text_that_is_not_an_action_is_refused(text, message):
    with pytest.raises(RequestError) as caught:
        parse_action(text)
    assert message in str(caught.value)
