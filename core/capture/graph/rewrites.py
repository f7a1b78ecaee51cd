"""Rewrites of a captured graph that later traces and cuts need; each computes the same numbers.

- Operators that return their input itself keep the alias in later traces.
- Masked scatters get gradients whose sizes do not depend on values.
- Buffers that a step assigns a new tensor: earlier reads keep the old values.

In eager PyTorch an assignment gives the module a new tensor; tensors that were read before, and what autograd saved,
keep the old values. In a captured graph an assignment is a copy into the buffer at the end of the step. So the step
reads a clone, created before the first reader, and the copy is moved to where the new values are known. All nodes
between the two belong to one stage.

A captured graph must not contain checks of values, written constants, and operators with sparse gradients:

- Tracing turns a user's assertion about a tensor's values into operators that compute a Python number and test it. No
  result depends on them, and every stage would wait for its tensors in the middle of a program: they are removed.
- A tensor that a captured step writes must be held by one stage for microbatches of every shape; a constant of a
  captured graph belongs to that graph alone. So tensors that a step writes and that are plain attributes of modules
  become buffers, which are not persistent, so that ``state_dict`` does not change.
- The gradients of operators with ``sparse=True`` are not supported.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ..values.capture_errors import WritesTensor
from ..values.late_numbers import LateNumber
from ..values.user_lines import line_of
from .nodes import arguments_by_name, inserted_call, module_of, root_of, written_arguments

aten = torch.ops.aten

_DROPOUTS = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}


def copy_written(graph: fx.Graph, names: Collection[str]) -> dict[str, str]:
    """Replace tensors of the batch that the step writes in place by copies, one for each microbatch.

    Args:
        graph: a captured graph; changed in place.
        names: of the batch's placeholders.

    Returns:
        Name of each placeholder that is written → the user's first line that writes it.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for argument in written_arguments(node):
            roots.setdefault(root_of(argument), node)
    lines = {root.name: line_of(node) for root, node in roots.items() if root.name in names}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for root in roots:
        if root.name in names:
            with graph.inserting_after(last[0]):
                copied = graph.call_function(aten.clone.default, (root,))
            copied.meta = dict(root.meta)
            root.replace_all_uses_with(copied, delete_user_cb=lambda user, copied=copied: user is not copied)  # type: ignore[misc]
    return lines


def rewrite_aliases(graph: fx.Graph) -> None:
    """Remove dropout that drops nothing, and have later readers of a tensor that is detached in place read the result.

    Such a dropout returns its input, so a write to one is a write to the other; tracing would copy it. Tracing would
    also lose that a tensor was detached in place. A tensor that is set to itself, as a parametrization does, is not
    written.

    Args:
        graph: a captured graph; changed in place.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source: Any = node.args[0] if node.args else None
        unchanged = node.target in _DROPOUTS and (node.args[1] == 0 or not node.args[2])
        if unchanged or (node.target is aten.set_.source_Tensor and source is node.args[1]):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target is aten.detach_.default:
            node.target = aten.detach.default
            here = position[node]
            source.replace_all_uses_with(node, delete_user_cb=lambda user, here=here: position[user] > here)


def rewrite_masked_scatters(graph: fx.Graph) -> None:
    """Replace every masked scatter by a choice between the old values and gathered new values.

    The gradient of a masked scatter selects by the mask, so its size is not known before it runs. Both forms only copy
    numbers and add zeros to gradients, so they are equal to the last bit.

    Args:
        graph: a captured graph; changed in place.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.masked_scatter.default:
            _rewrite(graph, node)


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    values, mask, source = node.args
    shape = list(node.meta["val"].shape)

    call = partial(inserted_call, graph, node)
    with graph.inserting_before(node):
        chosen = call(aten.expand.default, mask, shape)
        before = call(aten.cumsum.default, call(aten.reshape.default, chosen, [prod(shape)]), 0)
        position = call(aten.clamp.default, call(aten.sub.Tensor, before, 1), 0)
        picked = call(aten.index_select.default, call(aten.reshape.default, source, [-1]), 0, position)
        new = call(aten.where.self, chosen, call(aten.reshape.default, picked, shape), values)
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def keep_read_values(graph: fx.Graph, assigned: Collection[str]) -> None:
    """Have a step read clones of the buffers that it assigns.

    Args:
        graph: a captured graph; changed in place.
        assigned: names of the placeholders of these buffers.
    """
    copies = {
        node.args[0]: node
        for node in graph.nodes
        if node.target is aten.copy_.default and isinstance(node.args[0], fx.Node) and node.args[0].name in assigned
    }  # the last one of each: the assignment
    for buffer, copy in copies.items():
        readers = [node for node in graph.nodes if node in buffer.users and node is not copy]
        if not readers:
            continue
        with graph.inserting_before(readers[0]):
            clone = graph.call_function(aten.clone.default, (buffer,))
        clone.meta = {**readers[0].meta, "val": buffer.meta["val"]}
        for reader in readers:
            reader.replace_input_with(buffer, clone)
    for copy in copies.values():
        _move_up(graph, copy)


def _move_up(graph: fx.Graph, copy: fx.Node) -> None:
    """Move a copy to the first position at which the values that it copies are final."""
    buffer, value = copy.all_input_nodes
    moved = [value, copy] if value.target is aten.detach.default and list(value.users) == [copy] else [copy]
    position = {node: i for i, node in enumerate(graph.nodes)}
    root = root_of(value)
    waits_for = [n for n in graph.nodes if n is not copy and any(root_of(a) is root for a in written_arguments(n))]
    waits_for += [n for one in moved for n in one.all_input_nodes if n not in moved]
    waits_for += [reader for reader in buffer.users if reader is not copy]
    last = max(waits_for, key=lambda node: position[node])
    for node in moved if last.op != "placeholder" else ():
        last.append(node)
        last = node


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
    return any(map(_symbolic, pytree.tree_leaves(node.meta.get("val"))))


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

    One that is assigned anew and has the memory of a parameter, as ``torch.nn.utils.spectral_norm`` leaves it, becomes
    a copy: the parameter is not written.

    Args:
        model: the user's module.
        written: the tensor, or a view of it.

    Raises:
        RequestError: no module has it.
    """
    own = [(m, key, v) for m in model.modules() for key, v in m.__dict__.items() if isinstance(v, Tensor)]
    found = next((tensor for _, _, tensor in own if _have_equal_memory(tensor, written.tensor)), None)
    state = found
    if found is not None and written.assigned and any(_have_equal_memory(p, found) for p in model.parameters()):
        state = found.clone()
    for module, key, tensor in own:
        if tensor is found:
            del module.__dict__[key]
            module.register_buffer(key, state, persistent=False)
    if found is None:
        raise RequestError(
            f"{written.line or 'the step'}: the step writes a tensor {tuple(written.tensor.shape)} in place that is "
            "not an attribute of a module: each captured graph would have its own copy; register it with "
            "register_buffer"
        )


def _have_equal_memory(one: Tensor, other: Tensor) -> bool:
    return one is other or (not one.is_meta and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
