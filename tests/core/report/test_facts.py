"""Checks of a report: which outcomes are failures, and which are missed predictions."""

import pytest
from panpipe.core.report.facts import Check, Checked, ReportFacts


@pytest.mark.parametrize(
    ("verdict", "about", "failed", "missed"),
    [
        (False, Checked.RESULT, True, False),
        (False, Checked.PREDICTION, False, True),
        (True, Checked.RESULT, False, False),
        (None, Checked.RESULT, False, False),
        (None, Checked.PREDICTION, False, False),
    ],
)
def test_only_a_false_verdict_fails_a_result_or_misses_a_prediction(verdict, about, failed, missed):
    check = Check("gradients", "0", verdict, about)
    assert (check.failed, check.missed) == (failed, missed)


def test_facts_take_any_sequence():
    facts = ReportFacts(losses=[1.0, 2.0], checks=iter([Check("a", "b")]))
    assert (facts.losses, facts.checks) == ((1.0, 2.0), (Check("a", "b"),))
