"""One microbatch through the stages of a step by hand, with no team: forward one after the other, then back."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from panpipe.core.capture.export.operators import Operators, operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.graph.randomness import KeyedRandom, random_key
from panpipe.runtimes.programs.compiled import compile_stages
from panpipe.runtimes.programs.stage_run import StageRun
from panpipe.runtimes.update.stage_state import StageState
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Gradients = dict[str, Tensor | None]


def by_stages(
    model: nn.Module,
    step: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    cuts: int,
    *,
    split: bool = False,
    recompute: bool = False,
    real: Any = None,
) -> tuple[Tensor, Gradients]:
    """Loss and gradients of one microbatch.

    Args:
        model: its gradients are replaced, its buffers updated.
        step: ``step(model, batch)``.
        batch: one microbatch.
        cuts: into how many stages, with as many operators each; fewer where there are fewer operators.
        split: whether backwards are I and W.
        recompute: whether stages recompute.
        real: the batch to run, by default the one that is captured.
    """
    operators = operators_of(capture_step(model, step, batch))
    names = [node.name for node in operators.graph.nodes]
    cuts = min(cuts, len(names))
    stages = [names[i * len(names) // cuts : (i + 1) * len(names) // cuts] for i in range(cuts)]
    runs = stage_runs(model, operators, stages, recompute)
    leaves = tuple(pytree.tree_leaves(batch if real is None else real))
    key, seed = random_key(0, 0, 0), torch.ones((), dtype=operators.values[operators.step.outputs.loss].dtype)
    sent: dict[tuple[int, int], list[Tensor]] = {}
    returned: dict[tuple[int, int], list[Tensor]] = {}
    loss = None
    with torch.no_grad():
        for run in runs:
            given = [sent[src, run.index][i] for src, i in run.sources]
            outputs, results = run.forward(0, given, leaves, key)
            for reader, places in run.outgoing.items():
                assert all(outputs[i].is_contiguous() for i in places)
                sent[run.index, reader] = [outputs[i].clone() for i in places]
            loss = results[0] if results else loss
        for run in reversed(runs):
            if recompute:
                run.recompute(0, leaves, key)
            tangents = {i: sum(returned[reader, run.index][j] for reader, j in of) for i, of in run.tangents.items()}
            if split:
                messages = run.backward_input(0, tangents, seed, leaves, key)
                run.backward_weight(0, seed, leaves, key)
            else:
                messages = run.backward(0, tangents, seed, leaves, key)
            for sender, message in zip(run.returned, messages, strict=True):
                returned[run.index, sender] = message
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def stage_runs(
    model: nn.Module, operators: Operators, stages: Sequence[Sequence[str]], recompute: bool = False
) -> list[StageRun]:
    """All stages of a plan, on the model's own tensors."""
    model.zero_grad(set_to_none=True)
    compiled, own = compile_stages(operators, stages, range(len(stages))), dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    runs = []
    for index, programs in compiled.programs.items():
        parameters = {name: own[name] for name in programs.inputs.parameters}
        state = StageState(parameters, {name: buffers[name] for name in programs.inputs.buffers}, None)
        runs.append(StageRun(index, compiled, state, recompute))
    return runs


def in_one_process(model: nn.Module, step: Callable[[nn.Module, Any], Tensor], batch: Any) -> tuple[Tensor, Gradients]:
    """The same in eager PyTorch, with the same random numbers."""
    model.zero_grad(set_to_none=True)
    with KeyedRandom(random_key(0, 0, 0)):
        loss = step(model, batch)
        loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(
    model: nn.Module,
    step: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    cuts: int,
    *,
    real: Any = None,
    **options: Any,
) -> None:
    """Loss, gradients and buffers by stages equal those of one process; arguments are those of `by_stages`."""
    alone = copy.deepcopy(model)
    wanted, gradients = in_one_process(alone, step, batch if real is None else real)
    loss, found = by_stages(model, step, batch, cuts, real=real, **options)
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-9)
    for name, gradient in gradients.items():
        if gradient is None or found[name] is None:
            assert gradient is found[name], name
            continue
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-9, atol=1e-9)
