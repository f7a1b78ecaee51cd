"""Removal of checks of values from a captured graph.

Tracing turns a user's assertion about a tensor's values into operators that compute a Python number and test it. No
result depends on them, and every stage would wait for its tensors in the middle of a program.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..values.late_numbers import LateNumber

_TESTS = {
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


@contextmanager
def late_checks_dropped() -> Iterator[None]:
    """Within this context, assertions about late numbers are removed, too."""
    original: Any = torch._check_with  # all of torch's checks call it

    def check(error: Any, condition: Any, *message: Any) -> None:
        if type(condition) is not LateNumber:
            original(error, condition, *message)

    with mock.patch.object(torch, "_check_with", check):
        yield


def drop_checks(graph: fx.Graph) -> None:
    """Erase tests of values, and numbers and sizes read from values that have no other use.

    Args:
        graph: a captured graph; changed in place.
    """
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.users:
            continue
        if node.target in _TESTS or depends_on_values(node) or "val" not in node.meta:  # without: it could not be run
            graph.erase_node(node)


def depends_on_values(node: fx.Node) -> bool:
    """Whether a node's result is a number, or has a size, that is known only when the step runs."""
    return any(map(_symbolic, _leaves(node.meta.get("val"))))


def _leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, tuple | list) else [value]


def _symbolic(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(map(_symbolic, value.shape))
    if not isinstance(value, SymInt | SymFloat | SymBool):
        return False
    return bool(free_unbacked_symbols(value.node._expr))  # also if the sizes of other tensors give its value
