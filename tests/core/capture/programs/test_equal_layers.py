"""A stage's joint graph, assembled from traces of its operators: that of a trace of the whole stage."""

import pytest
import torch
from panpipe.core.capture.programs import equal_layers
from panpipe.core.capture.programs.equal_layers import Assembly, stage_joint
from panpipe.core.capture.programs.joint_graph import CAPTURED, trace_joint
from torch import fx, nn

from ....support.stages.graphs import operators, stages

LAYERS = 6


class Layer(nn.Module):
    def __init__(self, rate=0.5):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, rate, batch_first=True)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)) for _ in range(LAYERS)
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu_(layer(x)) + x
        return x


class Tied(nn.Module):
    """Embedding and head of one weight; one tensor is read by all layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))

    def forward(self, x):
        first = x = self.embedding(x)
        for layer in self.layers:
            x = torch.tanh(layer(x) * first) + first
        return x @ self.embedding.weight.t()


def mean(model, batch):
    return model(batch).square().mean()


def autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return mean(model, batch)


def described(joint):
    """The graph in a form that is equal for equal graphs."""
    names = {node: f"input {i}" for i, node in joint.primals.items()}
    names |= {node: f"tangent {i}" for i, node in joint.tangents.items()}
    found = []
    for node in joint.graph.nodes:
        if node.op == "call_function":
            names[node] = f"node {len(found)}"
            values = torch.utils._pytree.tree_leaves(node.meta["val"])
            layouts = [(v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in values]
            read = fx.map_arg((node.args, node.kwargs), lambda _: None)
            given = [names.get(source, str(source.target)) for source in node.all_input_nodes]
            line = (node.meta.get("stack_trace") or "").strip().splitlines()[-1:]
            found.append((str(node.target), str(read), given, layouts, node.meta.get(CAPTURED), line))
    return found, *({k: names[n] for k, n in part.items()} for part in (joint.gradients, joint.mutations)), [
        names[n] for n in joint.outputs
    ]  # fmt: skip


CASES = {
    "dropout": (lambda: nn.Sequential(*(Layer() for _ in range(LAYERS))), mean, torch.ones(2, 4, 8)),
    "without dropout": (lambda: nn.Sequential(*(Layer(0.0) for _ in range(LAYERS))), mean, torch.ones(2, 4, 8)),
    "batch norm": (Convolutions, mean, torch.ones(2, 3, 4, 4)),
    "tied": (Tied, mean, torch.zeros(2, 4, dtype=torch.int64)),
    "autocast": (lambda: nn.Sequential(*(Layer() for _ in range(LAYERS))), autocast, torch.ones(2, 4, 8)),
}


@pytest.mark.parametrize(
    "name", [n if n in ("dropout", "batch norm") else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_assembled_graph_is_that_of_the_whole_stage(name, monkeypatch):
    monkeypatch.setattr(equal_layers, "LEAST", 1)
    make, step, batch = CASES[name]
    captured = operators(make(), step, batch)
    for stage in stages(captured):
        (nodes, *rest), (wanted, *others) = described(Assembly(stage).joint()), described(trace_joint(stage))
        assert [(a, b) for a, b in zip(nodes, wanted, strict=True) if a != b] == []
        assert rest == others


def test_equal_layers_are_traced_once(monkeypatch):
    traced = []
    monkeypatch.setattr(equal_layers, "trace_joint", lambda stage: traced.append(stage) or trace_joint(stage))

    def count(layers):
        traced.clear()
        captured = operators(nn.Sequential(*(Layer() for _ in range(layers))), mean, torch.ones(2, 4, 8))
        stage_joint(stages(captured)[0])
        return len(traced)

    assert count(6) == count(9) <= 3
