"""The findings of ``panpipe doctor``, as text and as plain data."""

import pytest
import torch
from attrs import evolve
from panpipe.answers.doctor_answer import plain_findings, print_findings
from panpipe.runtimes.diagnose.doctor import Check, Findings, UncutOperator
from panpipe.runtimes.diagnose.parity import Distance

RIGHT = Check(2, "1f1b", 2, Distance(worst={"loss": "loss"}), "", 1.0)
WRONG = Check(3, "v-half", 6, Distance(gradient=0.5, worst={"gradient": "0.weight"}), "", 1.0)
FAILED = Check(2, "v-half", 4, None, "boom", 1.0)
FEW = evolve(FAILED, problem="4 stages for 3 operators", too_many_stages=True)
UNDEFINED = Check(2, "1f1b", 2, Distance(undefined=3), "", 1.0)


def findings(*checks, **others):
    return Findings("net", torch.float64, 7, 1.25, others.pop("regions", {}), others.pop("uncut", ()), checks, **others)


def printed(capsys, found):
    print_findings(found)
    return capsys.readouterr().out


def test_answer_has_every_check_with_its_distances():
    found = plain_findings(findings(RIGHT, WRONG, FAILED))
    assert (found["model"], found["dtype"], found["operators"], found["healthy"]) == ("net", "float64", 7, False)
    right, wrong, failed = found["checks"]
    assert right == {
        "devices": 2, "schedule": "1f1b", "stages": 2, "right": True, "problem": "", "loss": 0.0, "gradient": 0.0,
        "parameter": 0.0, "buffer": 0.0, "undefined": 0,
    }  # fmt: skip
    assert (wrong["right"], wrong["gradient"]) == (False, 0.5)
    assert failed == {"devices": 2, "schedule": "v-half", "stages": 4, "right": False, "problem": "boom"}


def test_answer_has_the_parts_that_stay_python_and_those_that_cannot_be_cut():
    found = plain_findings(findings(regions={"1": "a.py:3"}, uncut=(UncutOperator("add_", 0.25, "a.py:5"),)))
    assert found["python"] == [{"where": "1", "line": "a.py:3"}]
    assert found["uncut"] == [{"operator": "add_", "share": 0.25, "line": "a.py:5"}]


def test_text_of_a_healthy_model(capsys):
    text = printed(capsys, findings(RIGHT, FEW))
    assert text.startswith("net: captured in 1.2 s, 7 operators to cut between\n")
    assert "v-half on 2 devices (not tried): 4 stages for 3 operators" in text
    assert "Differences up to 1e-09, and 1e-09 of a gradient's norm, count as rounding.\n" in text
    assert text.endswith("It trains as one process does.\n")


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (WRONG, "v-half on 3 devices differs most in gradient: 0.weight"),
        (FAILED, "v-half on 2 devices: boom"),
        (UNDEFINED, "1f1b on 2 devices: 3 losses and elements of gradients are not finite in one process either"),
    ],
)
def test_text_of_a_model_that_does_not_train(capsys, check, said):
    text = printed(capsys, findings(RIGHT, check))
    assert said in text
    assert text.endswith("It does not train as one process does.\n")


def test_table_has_zero_as_zero_and_a_dash_for_what_did_not_run(capsys):
    lines = printed(capsys, findings(WRONG, FAILED)).splitlines()
    wrong = next(line for line in lines if line.startswith("v-half on 3"))
    failed = next(line for line in lines if line.startswith("v-half on 2") and "–" in line)
    assert wrong.split()[3:] == ["0", "5.0e-01", "0", "0", "DIFFERS"]
    assert failed.split()[3:] == ["–", "–", "–", "–", "not", "run"]


def test_text_names_python_and_its_cause(capsys):
    regions = {"1": "a.py:3", "the end of the step": "a.py:9"}
    text = printed(capsys, findings(RIGHT, regions=regions, causes={"1": "it branches"}))
    assert "- module '1' remains Python code, on one stage: a.py:3: it branches.\n" in text
    assert (
        "- the end of the step remains Python code, on one stage: a.py:9: this line needs the value of a tensor.\n"
        in text
    )
    text = printed(capsys, findings(RIGHT, uncut=(UncutOperator("add_", 0.25, "a.py:5"),)))
    assert "- add_ has 25% of all operations and cannot be cut: a.py:5 writes" in text
