"""Buffers that a step assigns a new tensor: earlier reads keep the old values.

In eager PyTorch an assignment gives the module a new tensor; tensors that were read before, and what autograd saved,
keep the old values. In a captured graph an assignment is a copy into the buffer at the end of the step. So the step
reads a clone, created before the first reader, and the copy is moved to where the new values are known. All nodes
between the two belong to one stage.
"""

from collections.abc import Collection

import torch
from torch import fx

from .nodes import root_of, written_arguments

aten = torch.ops.aten


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
