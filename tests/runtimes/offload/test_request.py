"""What ``panpipe.pipeline`` refuses of ``offload``, ``offload_to`` and ``host_memory``, before it measures anything."""

import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError

from ...laws.grouped import grouped
from ...support.cuts import captured_once, even_plan
from ...support.models import CASES
from ...support.offloading import all_away

F32 = torch.float32
CASE = CASES["tied gpt with dropout"]


def asked(**options):
    panpipe.pipeline(
        CASE.model(F32), CASE.step, CASE.batch(8, F32), **grouped(microbatches=4, progress=False, **options)
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "most"}, "offload is 'most': give 'none', 'all', 'auto', or the share of each stage"),
        ({"offload": {0: 1.5}}, "offload of stage 0 is 1.5: give a share from 0 to 1"),
        ({"offload": {0: -0.1}}, "offload of stage 0 is -0.1: give a share from 0 to 1"),
        ({"offload": {-1: 1.0}}, "offload names stage -1: stages are numbered from 0"),
        ({"offload": {4: 1.0}, "mesh": 2}, "offload names stage 4, and the plan has stages 0 to 3: name those"),
        ({"offload_to": "/no/such/folder"}, "offload_to is '/no/such/folder': give 'host', 'disk'"),
        ({"host": -1}, "host is -1: give bytes"),
    ],
)
def test_requests_that_no_plan_can_have_are_refused_in_one_line(options, said):
    with pytest.raises(RequestError, match=said) as refused:
        asked(**options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("offload", "said"),
    [
        ("none", r"offload is 'none' and the plan has offload of stages \[0, 1\]"),
        ({2: 1.0}, "offload names stage 2, and the plan has stages 0 to 1"),
    ],
)
def test_a_plan_that_contradicts_the_request_is_refused(offload, said):
    operators = captured_once(CASE, F32, 8, 4)
    plan = all_away(even_plan(operators, 2, 4, "gpipe"), operators)
    with pytest.raises(RequestError, match=said):
        asked(plan=plan, offload=offload)
