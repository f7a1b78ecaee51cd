"""Operators' times: those that do the same work have one."""

import torch
from panpipe.core.analytic.single_operator import LoneOperator
from panpipe.runtimes.profile.operator_profile import profile_operators

from ...support.cuts import captured_once
from ...support.models import CASES


def test_equal_operators_have_one_time_and_all_have_their_saved_bytes():
    case = CASES["token-weighted"]  # of two equal layers
    operators = captured_once(case, torch.float32, 4, 2)
    model = case.model(torch.float32)
    leaves = [leaf[:2] for leaf in torch.utils._pytree.tree_leaves(case.batch(4, torch.float32))]
    graph = profile_operators(
        operators, dict(model.named_parameters()), dict(model.named_buffers()), leaves, repeats=2
    )  # fmt: skip
    times = {}
    for node in graph.nodes:
        key = LoneOperator(operators, node.name).key
        found = node.forward_s, node.backward_input_s, node.backward_weight_s
        assert times.setdefault(key, found) == found
    assert len(times) < len(graph.nodes)
    assert all(node.forward_s > 0 for node in graph.nodes)
    layers = [[node.saved_bytes for node in graph.nodes if f".{i}." in node.name] for i in range(2)]
    assert layers[0] == layers[1]
    assert sum(layers[0]) > 0
