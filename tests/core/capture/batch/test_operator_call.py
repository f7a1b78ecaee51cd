"""Calls of operators: their arguments, and the check of rows that torch's kernels make."""

import pytest
import torch
from panpipe.core.capture.batch.operator_call import OperatorCall

ADD, SOFTMAX = torch.ops.aten.index_add.default, torch.ops.aten._softmax.default


def call(func, *args, **kwargs):
    return OperatorCall(func, func._schema.name.partition("::")[2], args, kwargs, [], [])


def test_argument_is_found_by_place_by_keyword_and_by_default():
    assert call(SOFTMAX, None, 1, False).argument("dims", "dim") == 1
    assert call(SOFTMAX, None, dim=2, half_to_float=False).argument("dim") == 2
    assert call(ADD, None, 0, None, None).argument("alpha") == 1
    assert call(ADD, None, 0, None, None).argument("other") is None


@pytest.mark.parametrize(("table", "dim", "indices", "source"), [
    ((3, 4), 0, 8, (8, 4)), ((3, 4), 1, 8, (3, 8)), ((3,), 0, 8, (8,)), ((), 0, 1, ()), ((3, 4), 0, 8, (8, 5)),
    ((3, 4), 0, 8, (7, 4)),
])  # fmt: skip
def test_rows_that_do_not_fit_are_refused_as_by_torch(table, dim, indices, source):
    given = torch.zeros(table), dim, torch.zeros(indices, dtype=torch.int64), torch.zeros(source)
    try:
        torch.index_add(*given)
    except (RuntimeError, IndexError):
        with pytest.raises(RuntimeError, match="do not fit a table"):
            call(ADD, *given).check_rows(dim)
    else:
        call(ADD, *given).check_rows(dim)
