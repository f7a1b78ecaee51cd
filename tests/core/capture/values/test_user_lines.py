"""The user's lines in refusals, and what is said of errors inside torch."""

import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import stage_graph
from panpipe.core.errors import RequestError
from torch import nn


def test_operator_without_a_program_is_refused_with_its_line(monkeypatch):
    def step(model, x):
        return model(x).sin().mean()

    operators = operators_of(capture_step(nn.Linear(4, 1), step, torch.randn(3, 4)))
    stage = stage_graph(operators, [[node.name for node in operators.graph.nodes]], 0)
    node = next(node for node in stage.graph.nodes if node.target is torch.ops.aten.sin.default)

    def fails(x):
        raise RuntimeError('INTERNAL ASSERT FAILED at "x.cpp":1, please report a bug to PyTorch. no kernel')

    node.target = fails
    line = f"{__file__}:{step.__code__.co_firstlineno + 1}"
    with pytest.raises(RequestError, match=rf"{line}: .*torch fails internally \(no kernel\)"):
        stage_programs(stage)


def test_warning_of_kept_values_names_the_users_line():
    seen = {}

    def step(model, x):
        loss = model(x).mean()
        seen["loss"] = loss.item()
        return loss

    with pytest.warns(UserWarning, match="'seen'") as caught:
        capture_step(nn.Linear(4, 1), step, torch.randn(3, 4))
    place = next((one.filename, one.lineno) for one in caught if "'seen'" in str(one.message))
    assert place == (__file__, step.__code__.co_firstlineno + 2)
