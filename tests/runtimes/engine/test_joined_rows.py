"""The rows of a function's microbatches, joined in order: where they are stored, sent, and refused."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.core.capture.graph.outputs import RowOutputs
from panpipe.core.errors import RequestError
from panpipe.runtimes.engine.joined_rows import JoinedRows
from torch.utils import _pytree as pytree

CPU = torch.device("cpu")
NESTING = pytree.tree_structure({"a": 0, "none": 0, "t": 0})


def compiled(rows, width=3, dtype=torch.float32):
    """Stage 0 computes a (a row for each sample), stage 1 computes t (a column for each)."""
    outputs = RowOutputs(("a", None, "t"), (0, 0, 1), NESTING, "t")
    values = {"a": torch.empty(rows, 2, dtype=dtype), "t": torch.empty(width, rows)}
    return SimpleNamespace(
        operators=SimpleNamespace(step=SimpleNamespace(outputs=outputs), values=values), stage_of={"a": 0, "t": 1}.get
    )


def joined(*each, local=(0, 1), everywhere=True, pieces=(2, 1)):
    prepared = SimpleNamespace(plan=SimpleNamespace(placement=(0, 1)), compiled=each or (compiled(2), compiled(1)))
    team = SimpleNamespace(local=local, size=2)
    samples = [SimpleNamespace(samples=count) for count in pieces]
    return JoinedRows(prepared, samples, team, dict.fromkeys(local, CPU), everywhere)


A = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])]
T = [torch.tensor([[1.0, 2.0]] * 3), torch.tensor([[9.0]] * 3)]


def test_rows_are_joined_in_order_along_their_dimension():
    found = joined()
    for m in (1, 0):
        assert found.store("a", m, A[m])
        assert found.store("t", m, T[m])
    result = found.result()
    assert result["a"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert result["t"].tolist() == [[1, 2, 9]] * 3
    assert result["t"].is_contiguous()
    assert result["none"] is None


def test_each_device_sends_the_rows_that_it_computes():
    found = joined(local=(1,))
    found.store("t", 1, T[1])
    first, second = found.sent_by(1)
    assert (first.shape, second.tolist()) == ((2, 3), [[9, 9, 9]])
    assert [rows.shape for rows in found.sent_by(0)] == [(2, 2), (1, 2)]
    second.fill_(7)
    assert found.result()["t"][:, 2].tolist() == [7, 7, 7]


def test_nothing_is_sent_in_one_process():
    assert joined().sent_by(0) == []


def test_rows_stay_where_they_are_computed():
    found = joined(local=(0,), everywhere=False)
    assert found.sent_by(0) == []
    for m in (0, 1):
        found.store("a", m, A[m])
    assert found.result()["a"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert found.result()["t"] is None


def test_results_of_other_shapes_or_types_are_refused():
    with pytest.raises(RequestError, match=r"returns 2×3 of .*float32 for 2 samples and 1×4 of .* for 1"):
        joined(compiled(2), compiled(1, width=4))
    with pytest.raises(RequestError, match=r"2×2 of .*float32 for 2 samples and 1×2 of .*float64 for 1: results"):
        joined(compiled(2), compiled(1, dtype=torch.float64))
