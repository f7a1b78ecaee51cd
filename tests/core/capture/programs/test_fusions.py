"""The calls of groups in programs: what they do before they are bound, and when they are."""

import torch
from panpipe.core.capture.programs.fusing import fused
from panpipe.core.capture.programs.fusions import Fusions
from panpipe.core.capture.programs.generated_code import compile_program, no_sink
from torch import fx

from ....support.nodes import SIDE, node, placeholder

aten = torch.ops.aten


def test_unbound_group_allocates_its_outputs():
    graph = fx.Graph()
    x = placeholder(graph, "x")
    total = node(graph, aten.add.Tensor, x, x)
    turned = node(graph, aten.neg.default, total)
    (fusion,) = fused([total, turned], {turned})
    fusions, scope = Fusions(), {}
    fusions.add(scope, "g", fusion)
    (taken,) = scope["g"]([x.meta["val"]])
    assert (taken.shape, taken.dtype, taken.stride()) == ((SIDE, SIDE), torch.float64, (SIDE, 1))
    fusions.bind(lambda _: lambda given: ["called", given])
    assert scope["g"](1) == ["called", 1]


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
