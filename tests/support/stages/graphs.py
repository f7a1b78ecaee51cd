"""Stages of small steps, cut out of their captured graphs."""

from collections.abc import Callable
from typing import Any

import torch
from panpipe.core.capture.export.operators import Operators, operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.stage import StageGraph, stage_graph
from torch import nn


def operators(model: nn.Module, step: Callable[..., Any], batch: Any, **options: Any) -> Operators:
    """The operators of a step."""
    with torch.enable_grad():
        return operators_of(capture_step(model, step, batch, **options))


def cut(found: Operators, *starts: int) -> list[list[str]]:
    """Names of the operators of stages that start at some operators, the first of them at 0."""
    names = [node.name for node in found.graph.nodes]
    return [names[a:b] for a, b in zip((0, *starts), (*starts, len(names)), strict=True)]


def stages(found: Operators, *starts: int) -> list[StageGraph]:
    """The graphs of such stages."""
    parts = cut(found, *starts)
    return [stage_graph(found, parts, index) for index in range(len(parts))]
