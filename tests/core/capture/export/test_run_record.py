"""The record of a run: equal runs, first differences, files that are read, and the refusals of each."""

import os

import pytest
import torch
from panpipe.core.capture.export.constant_values import ConstantValues
from panpipe.core.capture.export.kept_tensors import KeptTensors
from panpipe.core.capture.export.operand_origins import Operands
from panpipe.core.capture.export.run_record import (
    ASKS,
    READS_FILE,
    RecordedOperator,
    Recording,
    cause_in,
    first_difference,
    outside_noted,
    read_kept_refusal,
    refusal_of,
    refuse_outside,
)
from panpipe.core.errors import RequestError
from torch._subclasses.fake_tensor import FakeTensorMode

WEIGHT, OTHER, BATCH = torch.ones(2), torch.ones(2), torch.ones(2)


def run_of(function, values=None):
    """The operators of a run on fake tensors: two parameters and a batch of one shape."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    weight, other, batch = map(mode.from_tensor, (WEIGHT, OTHER, BATCH))
    kept = KeptTensors([weight, other])
    kept.begin([batch], [])
    recording = Recording(kept, Operands([("w", weight), ("o", other), (0, batch)]), values)
    with mode, recording:
        function(weight, other, batch)
    return recording.ran


def difference(one, other, values=ConstantValues):
    return first_difference(run_of(one, values()), run_of(other, values()))


def scaled(w, o, x):
    return (x * w).sum() * 2


def test_equal_runs_have_no_difference():
    assert difference(scaled, scaled) is None
    assert [ran.what[0] for ran in run_of(scaled)] == ["aten.mul.Tensor", "aten.sum.default", "aten.mul.Tensor"]


OTHERS = {
    "a number": lambda w, o, x: (x * w).sum() * 3,
    "the type of a number": lambda w, o, x: (x * w).sum() * 2.0,
    "an operator": lambda w, o, x: (x + w).sum() * 2,
    "a parameter of the same shape": lambda w, o, x: (x * o).sum() * 2,
    "the order of arguments": lambda w, o, x: (w * x).sum() * 2,
    "a shape": lambda w, o, x: (x[:1] * w[:1]).sum() * 2,
    "an operator more": lambda w, o, x: ((x * w).sum() * 2).neg(),
    "an operator fewer": lambda w, o, x: (x * w).sum(),
    "an earlier result": lambda w, o, x: ((x * w), (x * w).sum() * 2),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_different_runs_have_a_line(other):
    found = difference(scaled, other)
    assert found is not None
    assert found.line.startswith(f"{__file__}:")


def test_first_difference_is_that_of_the_second_run():
    one = [RecordedOperator("a", "1"), RecordedOperator("b", "2"), RecordedOperator("c", "3")]
    assert first_difference(
        one, [RecordedOperator("a", "x"), RecordedOperator("z", "4"), RecordedOperator("y", "5")]
    ) == RecordedOperator("z", "4")
    assert first_difference(one, one[:1]) == RecordedOperator("b", "2")
    assert first_difference(one[:1], one) == RecordedOperator("b", "2")
    assert first_difference(one, [RecordedOperator("a", "other line"), *one[1:]]) is None


def test_constants_are_compared_by_values_and_their_operators_are_not_recorded():
    def steps(by):
        def run(w, o, x):
            table = torch.arange(2.0) * by
            return x * table

        return run

    assert [ran.what[0] for ran in run_of(steps(2), ConstantValues())] == ["aten.mul.Tensor"]
    assert difference(steps(2), steps(2)) is None
    assert difference(steps(2), steps(3)) is not None
    assert "aten.arange.default" in [ran.what[0] for ran in run_of(steps(2))]


def test_tensors_that_are_not_fake_are_compared_by_their_values():
    def times(table):
        return lambda w, o, x: x * table

    def changed(one, other):
        return difference(times(one), times(other), values=lambda: None) is not None

    assert not changed(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    assert changed(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    assert changed(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_line_that_reads_a_tensor_of_an_earlier_run_is_known():
    kept = KeptTensors([])
    held = []
    for _ in range(2):
        batch = torch.ones(2)
        kept.begin([batch], [])
        recording = Recording(kept, Operands([(0, batch)]))
        with recording:
            for tensor in held:
                tensor + 1
            held.append(batch * 2)
    assert recording.read_kept.startswith(f"{__file__}:")
    assert recording.read_kept.endswith(str(test_line_that_reads_a_tensor_of_an_earlier_run_is_known
                                            .__code__.co_firstlineno + 9))  # fmt: skip


def test_files_that_are_read_or_looked_for_are_refused(tmp_path):
    there = tmp_path / "table.txt"
    there.write_text("1")
    ran = []
    with outside_noted(ran, []):
        there.read_text()
    assert {one.what for one in ran} == {READS_FILE}
    with pytest.raises(RequestError, match="it reads a file, or looks for one"):
        refuse_outside(ran)
    looked = []
    with outside_noted(looked, []):
        os.path.exists(there)
    assert [one.what for one in looked] == [READS_FILE]
    assert looked[0].line.startswith(__file__)


@pytest.mark.parametrize("mode", ["w", "a", "x", "r+"])
def test_files_that_are_written_are_not_recorded(tmp_path, mode):
    path, ran = tmp_path / "log", []
    if mode == "r+":
        path.write_text("")
    with outside_noted(ran, []), path.open(mode) as log:
        log.write("x")
    assert ran == []
    assert path.read_text() == "x"


def test_operators_are_not_refused():
    refuse_outside([RecordedOperator(("aten.mul.Tensor", ()), "train.py:3"), RecordedOperator("aten.mul", "")])


def test_state_that_cannot_be_compared_is_refused_with_what_is_asked():
    with pytest.raises(RequestError, match=r"train\.py:3: .*it calls Generator.random, whose state cannot be compared"):
        refuse_outside([RecordedOperator((ASKS, "Generator.random"), "train.py:3")])


def test_refusals_name_the_line_the_cause_and_the_fix():
    text = str(refusal_of(RecordedOperator("x", "train.py:3"), "it changes 'a'", "when it runs again"))
    assert text.startswith("train.py:3: the step computes something else here when it runs again (it changes 'a')")
    assert str(refusal_of(RecordedOperator("x", ""), "c", "w")).startswith("the step: the step computes something else")
    assert cause_in(["model.count", "b"]) == "it changes 'model.count'"
    assert cause_in([]) == "it reads an iterator, a clock or another state"
    assert "kept (it changes 'm'), but the Python of a captured step" in str(read_kept_refusal("train.py:3", ["m"]))
    assert "Python kept, but the Python of a captured step" in str(read_kept_refusal("train.py:3", []))
