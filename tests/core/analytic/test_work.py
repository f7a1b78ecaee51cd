"""FLOPs, bytes and memory of operators, against formulas of the papers, counts by hand, and torch's own counter."""

import pytest
import torch
from panpipe.core.analytic.model import ModelWork, model_work
from panpipe.core.analytic.single_operator import LoneOperator
from panpipe.core.analytic.work import TracedOperator, work_of
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import stage_graph
from panpipe.core.errors import RequestError
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

S, B, H, A = 64, 2, 96, 4
"""Sequence, batch, hidden size and heads of the layer; the papers' s, b, h, a."""


class Layer(nn.Module):
    """A transformer layer as in Zero Bubble (arXiv 2401.10241), attention written out or fused."""

    def __init__(self, fused, causal=False):
        super().__init__()
        self.fused, self.causal = fused, causal
        self.ln_1, self.ln_2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x):
        q, k, v = (part.view(B, S, A, H // A).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(H, dim=2))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            mixed = torch.softmax(q @ k.transpose(2, 3) / 5, dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(B, S, H))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


def captured(model, batch, step=lambda model, batch: model(batch).square().sum()):
    return operators_of(capture_step(model, step, batch))


def layers(count, **options):
    """Layers after an embedding, so that every one has inputs that are differentiable."""
    model = nn.Sequential(nn.Embedding(11, H), *(Layer(**options) for _ in range(count)))
    return captured(model, torch.zeros(B, S, dtype=torch.long))


def flops(work: ModelWork, counted=False):
    """FLOPs of F, I and W."""
    name = "counted_flops" if counted else "flops"
    return [
        sum(getattr(kernel, name) for operator in work.operators for kernel in getattr(operator.work, part))
        for part in ("forward", "backward_input", "backward_weight")
    ]


def work_alone(operators, index) -> TracedOperator:
    return work_of(LoneOperator(operators, operators.graph.nodes[index].name))


def test_flops_of_fused_attention_include_recomputed_scores_and_half_of_them_if_causal():
    forward, backward_input, weight = flops(model_work(layers(1, fused=True)))
    assert (forward, weight) == (S * B * H * (24 * H + 4 * S), S * B * H * 24 * H)
    assert backward_input == S * B * H * (24 * H + 10 * S)
    causal = flops(model_work(layers(1, fused=True, causal=True)))
    # A row sees itself and what is before it: (S + 1) / 2 of S columns.
    assert causal == [S * B * H * (24 * H + 2 * (S + 1)), S * B * H * (24 * H + 5 * (S + 1)), weight]


def test_flops_of_a_small_model_are_those_that_torch_counts_in_a_real_run():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.depth = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, groups=8)
            self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
            self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 5)

        def forward(self, x):
            x = self.norm(self.up(F.relu(self.depth(F.relu(self.conv(x))))))
            return self.head(x.mean((2, 3)))

    def step(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    batch = {"x": torch.randn(4, 3, 16, 16), "y": torch.zeros(4, dtype=torch.long)}
    model = Small()
    with FlopCounterMode(display=False) as counter:
        step(model, batch).backward()
    torch_counts_groups_wrong = 2 * 7 * 4 * 6 * 6 * 8 * 9  # of the weight's gradient, as if they were one
    found = sum(flops(model_work(captured(model, batch, step))))
    assert found == counter.get_total_flops() - torch_counts_groups_wrong


def test_bytes_of_elementwise_operators_by_hand():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(32))

        def forward(self, x):
            return torch.tanh(x * self.scale)

    operators = captured(Gate(), torch.zeros(8, 32), lambda model, x: F.mse_loss(model(x), x))
    multiply, tanh = work_alone(operators, 0), work_alone(operators, 1)
    (kernel,) = multiply.forward
    assert (kernel.name, kernel.kind, kernel.flops) == ("mul", "elementwise", 0)
    assert (kernel.read_bytes, kernel.written_bytes) == (4 * (8 * 32 + 32), 4 * 8 * 32)
    assert [k.name for k in multiply.backward_weight] == ["mul", "sum"]  # of x and gradient, over rows
    assert multiply.backward_input == ()  # the batch needs no gradient
    assert multiply.kept == ()  # nor is it kept: every stage has it
    (kernel,) = tanh.backward_input
    assert (kernel.read_bytes, kernel.written_bytes) == (2 * 4 * 8 * 32, 4 * 8 * 32)
    assert [kept.bytes for kept in tanh.kept] == [4 * 8 * 32]  # its own result


def test_views_and_expansions_are_free():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.row = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return x.view(4, 4, 16).transpose(0, 1) + self.row.expand(4, 4, 16)

    work = model_work(captured(Views(), torch.zeros(16, 16)))
    kernels = [kernel for operator in work.operators for kernel in operator.work.forward]
    assert [kernel.name for kernel in kernels] == ["add", "pow", "sum"]
    assert kernels[0].read_bytes == 4 * (256 + 16)


@pytest.mark.parametrize("options", [{"fused": False}, {"fused": True}, {"fused": True, "causal": True}])
def test_saved_bytes_are_those_of_the_stage_that_has_all_operators(options):
    operators = layers(2, **options)
    names = [node.name for node in operators.graph.nodes]
    whole = stage_programs(stage_graph(operators, [names], 0)).memory.saved
    assert sum(operator.saved_bytes for operator in model_work(operators).operators) == whole


def in_bfloat16(model, batch):
    """A head under autocast: the backward computes casts and wide logits again."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def spelled_out(model, batch):
    """A cross entropy whose parts are operators of their own."""
    x = model(batch).float()
    return (x.exp().sum(-1).log() - x.mean(-1)).mean()


@pytest.mark.parametrize("step", [in_bfloat16, spelled_out, lambda model, batch: model(batch).float().mean()])
def test_saved_bytes_are_without_what_the_backward_computes_again(step):
    model = nn.Sequential(nn.Embedding(11, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 512))
    model = model if step is in_bfloat16 else model.to(torch.bfloat16)
    operators = captured(model, torch.zeros(2, 64, dtype=torch.long), step)
    names = [node.name for node in operators.graph.nodes]
    found = sum(operator.saved_bytes for operator in model_work(operators).operators)
    assert found == stage_programs(stage_graph(operators, [names], 0)).memory.saved
    assert found < 2 * 64 * 512 * 4  # the logits are saved in bfloat16, not float32


def test_memory_of_stages_is_that_of_their_programs():
    """What operators keep adds up to what a stage's programs keep. The largest workspace is a bound of the stage's: for
    attention it has the incoming gradient next to those of queries, keys and values, and these next to each other.
    """
    model = nn.Sequential(nn.Embedding(11, H), Layer(fused=True), Layer(fused=True), nn.Linear(H, 11))

    def step(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    operators = captured(model, (torch.zeros(B, S, dtype=torch.long), torch.zeros(B, S, dtype=torch.long)), step)
    work = model_work(operators)
    names = [node.name for node in operators.graph.nodes]
    cut = [names[: len(names) // 2], names[len(names) // 2 :]]
    for index, stage in enumerate(cut):
        memory = stage_programs(stage_graph(operators, cut, index)).memory
        own = [operator for name, operator in zip(names, work.operators, strict=True) if name in stage]
        assert sum(operator.saved_bytes for operator in own) == memory.saved
        bound = max(operator.workspace_bytes for operator in own)
        assert memory.workspace <= bound <= memory.workspace + 2 * 4 * S * B * H


def test_saved_bytes_of_a_layer_equal_the_published_formula():
    """34sbh + 5as²b of Korthikanti et al. (arXiv 2205.05198) is for 2 bytes an element and with dropout's masks.

    Without them: 16 tensors of sbh elements, and what attention keeps of scores: their softmax.
    """
    first, second = (model_work(layers(n, fused=False)) for n in (1, 2))
    saved = [sum(operator.saved_bytes for operator in work.operators) for work in (first, second)]
    statistics = 2 * 2 * B * S  # mean and deviation of each row, of two normalisations
    assert saved[1] - saved[0] == 4 * (16 * S * B * H + A * S * S * B + statistics)


def test_recomputed_core_of_attention_saves_no_scores_and_multiplies_once_more():
    """Selective recomputation (Korthikanti et al., section 5): 34sbh are left, here without masks and in 4 bytes."""
    found = [model_work(layers(n, fused=False), attends_again=True) for n in (1, 2)]
    saved = [sum(operator.saved_bytes for operator in work.operators) for work in found]
    statistics = 2 * 2 * B * S
    assert saved[1] - saved[0] == 4 * (16 * S * B * H + statistics)
    plain = model_work(layers(1, fused=False))
    more = sum(
        kernel.flops
        for operator, before in zip(found[0].operators, plain.operators, strict=True)
        for kernel in operator.backward_input[len(before.backward_input) :]
    )
    assert more == 2 * B * S * S * H  # queries times keys
    assert found[0].flops == plain.flops  # utilisation counts no recomputation
    softmax = next(at for at, node in enumerate(plain.graph.nodes) if "softmax" in node.name)
    again = found[0].operators[softmax].workspace_bytes - plain.operators[softmax].workspace_bytes
    assert again == 4 * A * S * S * B  # held while it runs back
    with pytest.raises(RequestError, match="no attention of the model is written out"):
        model_work(layers(1, fused=True), attends_again=True)


def test_backward_that_overwrites_its_incoming_gradient_has_no_workspace():
    model = nn.Sequential(nn.Linear(H, H), nn.GELU(), nn.Linear(H, H))
    work = model_work(captured(model, torch.zeros(B, H)))
    of = {node.name: operator.work for node, operator in zip(work.graph.nodes, work.operators, strict=True)}
    [gelu] = [found for name, found in of.items() if "gelu" in name]
    assert gelu.has_backward
    assert gelu.backward_bytes == 0
    last = [found for name, found in of.items() if "linear" in name][-1]
    assert last.backward_bytes == 4 * (B * H + H)  # gradients of its input and of its bias; the weight's is added up
