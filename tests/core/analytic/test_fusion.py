"""Kernels that a compiler or a library writes for several operators."""

import pytest
import torch
from panpipe.core.analytic.model import model_work
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.cluster.catalog import find_device
from torch import nn

ROWS, WIDTH = 64, 32
SIZE = ROWS * WIDTH * 4


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def work(kernels):
    def step(model, x):
        return model[1](model[0](x)).pow(2).mean()

    model = nn.Sequential(Gated(), Gated())
    return model_work(operators_of(capture_step(model, step, torch.zeros(ROWS, WIDTH))), kernels)


def sections(found, part):
    return [k for each in found.operators for k in getattr(each.work, part) if k.name.startswith("section")]


def test_section_reads_its_inputs_and_writes_what_others_read_once():
    forward = sections(work("compiled"), "forward")
    weights = 2 * WIDTH * 4
    moved = [(kernel.read_bytes, kernel.written_bytes) for kernel in forward]
    # The first norm; silu and product; sum and second norm; silu and product; sum and loss.
    assert moved == [
        (SIZE + weights, SIZE), (2 * SIZE, SIZE), (2 * SIZE + weights, 2 * SIZE), (2 * SIZE, SIZE), (2 * SIZE, 4),
    ]  # fmt: skip


def test_backward_of_a_section_reads_gradients_and_what_it_computes_again():
    backward = sections(work("compiled"), "backward_input")
    # Of the product: its gradient, gate and up; written are the gradients of these.
    assert (3 * SIZE, 2 * SIZE) in [(kernel.read_bytes, kernel.written_bytes) for kernel in backward]


def test_values_within_a_section_are_not_saved():
    eager, compiled = (sum(each.saved_bytes for each in work(kernels).operators) for kernels in ("eager", "compiled"))
    assert compiled < eager


@pytest.mark.parametrize("device", ["A100", "H100"])
def test_fewer_kernels_take_less_time_with_the_same_products(device):
    times = []
    for kernels in ("eager", "compiled", "fused"):
        found = work(kernels)
        products = [k for each in found.operators for k in each.work.forward if k.kind == "matmul"]
        assert len(products) == 6
        graph = found.on(find_device(device))
        times.append(sum(n.forward_s + n.backward_input_s + n.backward_weight_s for n in graph.nodes))
    assert times[0] > times[1] > times[2]
