"""What a user asks to offload."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.offload.request import check_offload_request, parse_offload


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("some", "offload is 'some': give none, all, auto, or the share of each stage, such as 0:1,2:0.5"),
        ("0:1,0:0.5", "offload gives stage 0 twice"),
        ("0:1.5", r"offload of stage 0 is 1.5: give a share from 0 to 1"),
        ("0:nan", r"offload of stage 0 is nan: give a share from 0 to 1"),
        ("-1:1", "offload names stage -1: stages are numbered from 0"),
        ("0", "give none, all, auto"),
        ("", "give none, all, auto"),
    ],
)
def test_wrong_texts_are_refused(text, message):
    with pytest.raises(RequestError, match=message):
        parse_offload(text)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("half", "offload is 'half'"),
        (0.5, "offload is 0.5"),
        ({4: 1.0}, "offload names stage 4, and the plan has stages 0 to 3: name those"),
        ({"0": 1.0}, "offload names stage '0': stages are numbered from 0"),
        ({0: True}, "offload of stage 0 is True"),
        ({0: "1"}, "offload of stage 0 is '1'"),
    ],
)
def test_wrong_values_are_refused(wanted, message):
    with pytest.raises(RequestError, match=message):
        check_offload_request(wanted, stages=4)
