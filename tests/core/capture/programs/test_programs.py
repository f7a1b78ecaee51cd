"""The programs of a stage: what I and W each compute, and what is held between them."""

import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.generated_code import no_sink
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import stage_graph
from torch import nn

from ....support.models import Block

WIDTH, LENGTH = 16, 8
TENSOR = LENGTH * WIDTH * 4
"""Bytes of one tensor of the width, for one row."""


def last_stage(*modules: nn.Module):
    """Programs of these modules after a first stage that is one linear layer."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *modules)
    batch = torch.randn(1, LENGTH, WIDTH)
    operators = operators_of(capture_step(model, lambda model, batch: model(batch).pow(2).mean(), batch))
    names = [node.name for node in operators.graph.nodes]
    return stage_programs(stage_graph(operators, [names[:1], names[1:]], 1))


def parameters(programs, backward):
    names = programs.inputs.parameters
    return {names[i - len(programs.inputs.boundary)] for i in backward.parameters}


def test_backward_input_computes_the_parameter_gradients_of_a_norm():
    programs = last_stage(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    assert parameters(programs, programs.backward_input) == {"1.weight", "1.bias"}
    assert parameters(programs, programs.backward_weight) == {"2.weight", "2.bias"}


def test_convolution_backward_is_split_by_its_output_mask():
    programs = last_stage(nn.Conv1d(LENGTH, LENGTH, 3))
    assert parameters(programs, programs.backward_input) == set()
    assert parameters(programs, programs.backward_weight) == {"1.weight", "1.bias"}


def test_stage_whose_gradients_all_belong_to_i_is_not_split():
    programs = last_stage(nn.LayerNorm(WIDTH), nn.GELU())
    assert programs.backward is not None
    assert programs.backward_input is programs.backward_weight is None


def test_transformer_block_keeps_at_most_its_saved_bytes_for_w():
    """W reads the inputs of the four linear layers, 1 + 1 + 1 + 4 tensors, and the gradients of their outputs,
    3 + 1 + 4 + 1; F had kept inputs of all, the queries, keys and values, GELU's input, and the sums."""
    memory = last_stage(Block(WIDTH, 0.0).eval(), nn.Linear(WIDTH, WIDTH)).memory
    kept = memory.saved - memory.freed_by_input + memory.created_by_input
    assert kept <= memory.saved
    behind = 2 * TENSOR  # the input of the last linear layer and the gradient of its output
    assert kept == 16 * TENSOR + behind


class FilledSoftmax(torch.autograd.Function):
    """Softmax of the positive values; its forward creates a tensor from a number."""

    @staticmethod
    def forward(ctx, values):
        output = values.masked_fill(values <= 0, torch.tensor(-1e9)).softmax(-1)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        (output,) = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, output, -1, output.dtype)


class Filled(nn.Module):
    def forward(self, x):
        return FilledSoftmax.apply(x)


def test_tensor_that_an_autograd_function_creates_is_a_constant_of_the_program():
    torch.manual_seed(0)
    programs = last_stage(Filled())
    x = torch.randn(1, LENGTH, WIDTH)
    (loss,) = programs.forward_alone([x], no_sink)
    assert torch.equal(loss, FilledSoftmax.apply(x).pow(2).mean())
