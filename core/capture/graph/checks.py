"""What a captured graph must not contain: checks of values, written constants, and operators with sparse gradients.

- Tracing turns a user's assertion about a tensor's values into operators that compute a Python number and test it. No
  result depends on them, and every stage would wait for its tensors in the middle of a program: they are removed.
- A tensor that a captured step writes must be held by one stage for microbatches of every shape; a constant of a
  captured graph belongs to that graph alone. So tensors that a step writes and that are plain attributes of modules
  become buffers, which are not persistent, so that ``state_dict`` does not change.
- The gradients of operators with ``sparse=True`` are not supported.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...errors import RequestError
from ..values.capture_errors import WritesTensor
from ..values.late_numbers import LateNumber
from ..values.user_lines import line_of
from .nodes import arguments_by_name, module_of, root_of, written_arguments

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


RULE = "a pipeline supports only dense gradients; give sparse=False (sparse_grad=False), and use an optimizer for them"
"""The rule and the fix, for messages."""

_FLAGS = ("sparse", "sparse_grad")
"""Arguments of operators that ask for a sparse gradient of the first argument."""


def refuse_sparse_gradients(nodes: Iterable[fx.Node], values: Mapping[str, Any]) -> None:
    """Refuse operators that would give a sparse gradient.

    A stage's programs, messages and gradient sums are dense. A dense gradient in place of a sparse one would train
    differently, because optimizers skip rows that a sparse gradient does not contain.

    Args:
        nodes: calls of a captured graph.
        values: node name → its fake result; with ``requires_grad`` if a gradient flows.

    Raises:
        RequestError: an operator has a sparse gradient.
    """
    for node in nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and _is_sparse(node) and values[source.name].requires_grad:
            module = module_of(node)
            where = f"module '{module}'" if module else "the step"
            raise RequestError(f"{line_of(node)}: {where} asks {node.target} for sparse gradients: {RULE}")


def _is_sparse(node: fx.Node) -> bool:
    given = arguments_by_name(node.target, node.args, node.kwargs)
    return any(given.get(flag) for flag in _FLAGS)


def refuse_written_constants(graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
    """Refuse a graph that writes a captured constant.

    Args:
        graph: captured.
        constants: name of a placeholder → the constant.

    Raises:
        WritesTensor: for the first one.
    """
    for node in graph.nodes:
        for name in (root_of(argument).name for argument in written_arguments(node)):
            if name in constants:
                raise WritesTensor(constants[name], line_of(node))


def make_buffer(model: nn.Module, written: WritesTensor) -> None:
    """Register a tensor that a step writes as a buffer of all modules that have it as an attribute.

    Args:
        model: the user's module.
        written: the tensor, or a view of it.

    Raises:
        RequestError: no module has it.
    """
    own = [(m, key, v) for m in model.modules() for key, v in m.__dict__.items() if isinstance(v, Tensor)]
    found = next((tensor for _, _, tensor in own if _have_equal_memory(tensor, written.tensor)), None)
    for module, key, tensor in own:
        if tensor is found:
            del module.__dict__[key]
            module.register_buffer(key, tensor, persistent=False)
    if found is None:
        raise RequestError(
            f"{written.line or 'the step'}: the step writes a tensor {tuple(written.tensor.shape)} in place that is "
            "not an attribute of a module: each captured graph would have its own copy; register it with "
            "register_buffer"
        )


def _have_equal_memory(one: Tensor, other: Tensor) -> bool:
    return one is other or (not one.is_meta and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
