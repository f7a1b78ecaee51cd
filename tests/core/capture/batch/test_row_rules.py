"""Operators that do not treat samples independently: selected rows, positions, and relations between samples."""

import pytest
import torch
from panpipe.core.capture.batch.row_rules import (
    GROUPED,
    JOINT,
    LOOKUP,
    POSITIONAL,
    SEQUENCE,
    TOTAL,
    RowWatch,
    TraceStopped,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

ROWS = 61


def watched(run, stops=False):
    """The watch of a function of x (61 by 4), indices of the batch (61), and a table without samples (8 by 4)."""
    watch, mode = RowWatch(ROWS, ROWS, False, stops), FakeTensorMode()
    with mode:
        x, ids, table = torch.empty(ROWS, 4), torch.zeros(ROWS, dtype=torch.int64), torch.empty(8, 4)
        watch.read_numbers([x, ids])
        with watch:
            run(x, ids, table)
    return watch


def rows_of_a_column(x, ids, table):
    return x[:, 0] + torch.arange(ROWS)


INDEPENDENT = {
    "linear layer": lambda x, ids, table: F.linear(x, table).relu().mean(),
    "softmax over classes": lambda x, ids, table: x.softmax(1),
    "scan over features": lambda x, ids, table: x.cumsum(1),
    "layer norm": lambda x, ids, table: F.layer_norm(x, (4,)),
    "embedding": lambda x, ids, table: F.embedding(ids, table),
    "own row of each sample": lambda x, ids, table: x[torch.arange(ROWS), ids],
    "own class of each sample": lambda x, ids, table: x.gather(1, ids[:, None]),
    "convolution of samples": lambda x, ids, table: F.conv1d(x[:, None], x.new_empty(2, 1, 3)),
    "selection of some samples": lambda x, ids, table: x[x[:, 0] > 0] * 2,
    "weighted sum of sums": lambda x, ids, table: x.sum(0) * 2 + x.mean(0) / 3,
    "scattered values of its own": lambda x, ids, table: x.masked_scatter(x > 0, x * 2),
    "cross entropy": lambda x, ids, table: F.cross_entropy(x, ids),
    "constants": lambda x, ids, table: (table @ table.T).softmax(0),
    "attention within a sample": lambda x, ids, table: F.scaled_dot_product_attention(*[x.view(ROWS, 1, 2, 2)] * 3),
    "pooling of images": lambda x, ids, table: F.avg_pool2d(x.view(ROWS, 1, 2, 2), 2),
}


@pytest.mark.parametrize("run", INDEPENDENT.values(), ids=INDEPENDENT)
def test_operators_on_each_sample_are_no_findings(run):
    assert watched(run).findings == {}


DEPENDENT = {
    "all pairs": (lambda x, ids, table: x @ x.T, JOINT, "mm"),
    "product over samples": (lambda x, ids, table: x.T @ x, JOINT, "mm"),
    "softmax over samples": (lambda x, ids, table: x.softmax(0), JOINT, "_softmax"),
    "scan over samples": (lambda x, ids, table: x.cumsum(0), POSITIONAL, "cumsum"),
    "scattered values of no sample": (
        lambda x, ids, table: x.masked_scatter(x > 0, table), POSITIONAL, "masked_scatter",
    ),
    "reversed samples": (lambda x, ids, table: x.flip(0), POSITIONAL, "flip"),
    "rows by indices of the batch": (lambda x, ids, table: x[ids], LOOKUP, "index"),
    "rows by computed indices": (lambda x, ids, table: x[x[:, 0].long()], JOINT, "index"),
    "embedding in rows of the batch": (lambda x, ids, table: F.embedding(ids, x), LOOKUP, "embedding"),
    "gather over samples": (lambda x, ids, table: x.gather(0, ids[:, None]), LOOKUP, "gather"),
    "gather by shifted indices": (lambda x, ids, table: x.gather(0, ids[:, None] + 1), LOOKUP, "gather"),
    "scatter into classes": (
        lambda x, ids, table: table[:, 0].clone().index_add(0, ids, x[:, 0]), GROUPED, "index_add"),
    "last value of each class": (
        lambda x, ids, table: table[:, 0].clone().index_copy(0, ids, x[:, 0]), LOOKUP, "index_copy"),
    "samples without the center of their class": (
        lambda x, ids, table: torch.zeros_like(table).index_add(0, ids, x - table[ids]), GROUPED, "index_add"),
    "edges summed into nodes of a table": (
        lambda x, ids, table: torch.zeros_like(table).index_add(0, ids + 1, table[ids] * 2), LOOKUP, "index_add"),
    "a part of the samples": (lambda x, ids, table: x[1:], POSITIONAL, "slice"),
    "position of a sample": (rows_of_a_column, POSITIONAL, "add"),
    "rows of a table by position": (lambda x, ids, table: table[torch.arange(ROWS)] + x, POSITIONAL, "index"),
    "function of a sum": (lambda x, ids, table: x.sum(0).exp(), JOINT, "exp"),
    "product of sums": (lambda x, ids, table: x.sum(0) * x.mean(0), JOINT, "mul"),
    "samples scaled by a sum": (lambda x, ids, table: x * x.sum(0), JOINT, "mul"),
    "layer norm over samples": (lambda x, ids, table: F.layer_norm(x.T, (ROWS,)), POSITIONAL, "native_layer_norm"),
    "convolution over samples": (
        lambda x, ids, table: F.conv1d(x.T[None], x.new_empty(4, 4, 3), padding=1), SEQUENCE, "convolution"),
    "pooling over samples": (
        lambda x, ids, table: F.avg_pool2d(x[None, None], (3, 1), 1, (1, 0)), SEQUENCE, "avg_pool2d"),
    "triangle over samples": (lambda x, ids, table: x.tril(), POSITIONAL, "tril"),
    "row by row": (lambda x, ids, table: [row.exp() for row in x], POSITIONAL, "unbind"),
    "samples scaled by a product": (lambda x, ids, table: x / x.prod(), TOTAL, "div"),
    "samples without their mean": (lambda x, ids, table: x - x.mean(), TOTAL, "sub"),
    "samples scaled by a function of a total": (lambda x, ids, table: x * (x.sum() + 1).sqrt(), TOTAL, "mul"),
}  # fmt: skip


@pytest.mark.parametrize(("run", "kind", "operator"), DEPENDENT.values(), ids=DEPENDENT)
def test_operators_on_several_samples_are_found_by_kind(run, kind, operator):
    assert list(watched(run).findings) == [(kind, operator)]


def test_attention_over_samples_is_a_sequence():
    found = watched(lambda x, ids, table: F.scaled_dot_product_attention(*[x[None, None]] * 3)).findings
    assert {kind for kind, _ in found} == {SEQUENCE}


def test_labels_that_select_among_samples_are_found():
    def labelled(x, ids, table):
        return F.cross_entropy(x @ x.T, ids)

    def numbered(x, ids, table):
        return F.cross_entropy(x @ x.T, torch.arange(len(x)))

    assert (LOOKUP, "nll_loss_forward") in watched(labelled).findings
    assert (LOOKUP, "nll_loss_forward") not in watched(numbered).findings


def test_total_does_not_end_a_trace_that_stops():
    assert list(watched(lambda x, ids, table: (x - x.mean()).square(), stops=True).findings) == [(TOTAL, "sub")]


def test_loss_divided_by_a_count_is_no_total():
    assert watched(lambda x, ids, table: (x * 2).sum() / x.sum()).findings == {}


def test_finding_has_the_users_line_and_each_operator_is_found_once():
    (found,) = watched(lambda x, ids, table: (rows_of_a_column(x, ids, table), rows_of_a_column(x, ids, table))
                       ).findings.values()  # fmt: skip
    assert (found.kind, found.operator) == (POSITIONAL, "add")
    line = rows_of_a_column.__code__.co_firstlineno + 1
    assert found.line == f"{__file__}:{line}"


def test_first_finding_ends_a_trace_that_stops():
    after = []

    def run(x, ids, table):
        try:
            x.flip(0)
        except Exception:  # a step's own handler
            after.append("caught")
        after.append("continued")

    with pytest.raises(TraceStopped):
        watched(run, stops=True)
    assert after == []


def test_operators_with_samples_are_counted():
    assert watched(lambda x, ids, table: (x.relu().sum(), table.relu())).reach == 2


def test_inputs_are_recorded_by_identity():
    watch, x, other = RowWatch(ROWS, ROWS, False, False), torch.ones(2), torch.ones(2)
    with watch:
        x.relu()
    assert id(x) in watch.read
    assert id(other) not in watch.read


def test_selection_keeps_the_rows_of_samples_and_has_few_rows_of_others():
    shapes = []
    watched(lambda x, ids, table: shapes.extend([x[x[:, 0] > 0].shape, table[table[:, 0] > 0].shape]))
    assert shapes == [(ROWS, 4), (7, 4)]
