"""What ranks compare of their captured steps: the first operator that differs is named with both lines."""

import re
from types import SimpleNamespace

import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.agreement import check_same_step
from torch import nn

MODEL = nn.Linear(4, 4)


def fit(model, x):
    return model(x).square().mean()


def doubled(model, x):
    return (model(x) * 2).square().mean()


def tripled(model, x):
    return (model(x) * 3).square().mean()


def longer(model, x):
    return model(x).square().mean().sqrt()


def captured(step, rows=2):
    return operators_of(capture_step(MODEL, step, torch.ones(rows, 4)))


def compared(*steps, replicas=1):
    """Runs the comparison of ranks with these steps, each in turn; returns the message of each."""
    operators, said = [captured(step) if callable(step) else step for step in steps], []
    answers = [[], []]  # of all ranks to the two questions
    for asking in (0, 1):
        for here, mine in enumerate(operators):
            asked = []

            def everywhere(work, asked=asked, asking=asking, here=here):
                asked.append(work)
                if len(asked) == asking + 1:
                    answers[asking].append(work(here))
                    raise InterruptedError
                return answers[len(asked) - 1]

            team = SimpleNamespace(
                local=(here % 2,),
                size=len(steps) // replicas,
                replicas=replicas,
                rank=lambda n: n,
                everywhere=everywhere,
            )
            try:
                check_same_step(team, mine)
            except InterruptedError:
                continue
            said.append(None)
    if len(answers[1]) < len(operators):
        return said
    for mine in operators:
        rest = iter(answers)
        team = SimpleNamespace(
            local=(0,), size=len(steps) // replicas, replicas=replicas, rank=lambda n: n,
            everywhere=lambda work, rest=rest: next(rest),
        )  # fmt: skip
        with pytest.raises(RequestError) as refusal:
            check_same_step(team, mine)
        said.append(str(refusal.value))
    return said


def test_ranks_with_the_same_step_pass():
    assert compared(fit, fit) == [None, None]


@pytest.mark.parametrize(("steps", "said"), [
    ((fit, doubled), r"rank 1 runs aten.mul.Tensor\(2\) at .*test_step_agreement.py:\d+ where rank 0 runs aten.square"),
    ((doubled, tripled), r"rank 1 runs aten.mul.Tensor\(3\) at .* where rank 0 runs aten.mul.Tensor\(2\) at .*:\d+: "),
    ((longer, fit), r"rank 1 ends its step where rank 0 runs aten.sqrt.default at .*test_step_agreement.py:\d+"),
    ((fit, fit, longer), r"rank 2 runs aten.sqrt.default at .* where rank 0 ends its step"),
])  # fmt: skip
def test_the_first_other_operator_is_named_on_all_ranks(steps, said):
    found = compared(*steps)
    assert len(set(found)) == 1
    assert re.match(said, found[0]), found[0]
    assert "\n" not in found[0]


def test_replicas_may_have_other_numbers_but_no_other_operators():
    assert compared(doubled, doubled, tripled, tripled, replicas=2) == [None] * 4
    assert "rank 3 runs aten.mul.Tensor(2)" in compared(doubled, doubled, tripled, doubled, replicas=2)[0]
    assert "rank 2 runs" in compared(doubled, doubled, longer, longer, replicas=2)[0]


def test_steps_for_other_shapes_are_refused():
    assert "tensors of other shapes" in compared(captured(fit), captured(fit, rows=3))[0]
