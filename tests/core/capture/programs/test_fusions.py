"""The calls of groups in programs: when they are bound."""

import torch
from panpipe.core.capture.programs.fusing import Fusions
from panpipe.core.capture.programs.generated_code import compile_program, no_sink
from torch import fx

from ....support.nodes import node, placeholder

aten = torch.ops.aten


def test_groups_of_programs_that_are_not_needed_now_are_bound_when_they_are_called():
    graph = fx.Graph()
    x = placeholder(graph, "x")
    total = node(graph, aten.add.Tensor, x, x)
    turned = node(graph, aten.neg.default, total)
    fusions, asked = Fusions(), []
    now, late = (compile_program([total, turned], [x], [turned], {}, fusions=fusions) for _ in range(2))

    def call_of(fusion):
        asked.append(fusion)
        return lambda given: [-2 * given[0]]

    fusions.bind(call_of, [now])
    assert len(asked) == 1
    given = x.meta["val"]
    for count, program in ((1, now), (2, late), (2, late)):
        assert torch.equal(program([given], no_sink)[0], -2 * given)
        assert len(asked) == count
