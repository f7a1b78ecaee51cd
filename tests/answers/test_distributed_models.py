"""Plans of models to which ``parallelize_module`` was applied, over torch's fake process group."""

import json

import pytest
import torch
import torch.distributed as dist
from panpipe.answers.models import planned_model
from panpipe.cli import main
from panpipe.core.analytic.model import model_work
from panpipe.core.errors import RequestError
from panpipe.core.tensor_collectives import OneRank, communicating
from panpipe.runtimes.tensor_parallel.recording import program_of_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..support.models import sizes_of

HIDDEN, INNER, TOKENS = 16, 64, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, HIDDEN)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def step(model, batch):
    return model(batch["tokens"]).square().mean()


def make(layouts=None, ranks=2, ends=None):
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (4 // ranks, ranks), mesh_dim_names=("pp", "tp"))["tp"]
    parallelize_module(model, mesh, ends or {"embedding": RowwiseParallel(input_layouts=Replicate())})
    for block in model.blocks:
        parallelize_module(block, mesh, layouts or {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, step, {"tokens": torch.randint(32, (4, TOKENS))}


def sequence_parallel():
    layouts = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.1": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
    }
    return make(layouts, ends=ends)


def of_maximum():
    model, _, batch = make({"up": ColwiseParallel(use_local_output=False)})
    return model, lambda model, batch: model.blocks[0].up(model.embedding(batch["tokens"])).amax(), batch


def whole():
    return Model(), step, {"tokens": torch.randint(32, (4, TOKENS))}


@pytest.fixture(autouse=True)
def fake_ranks():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


FACTORY = f"{__name__}:make"


def test_program_of_a_rank_has_parts_of_parameters_and_all_reduces():
    planned = planned_model(FACTORY, 2, empty=True, tensor=2)
    full = {name: parameter.numel() for name, parameter in Model().named_parameters()}
    kept = ("norm.weight", "norm.bias", "down.bias")
    assert planned.sizes == {name: 4 * size // (1 if name.endswith(kept) else 2) for name, size in full.items()}
    work = model_work(planned.operators)
    hidden = 2 * TOKENS * HIDDEN * 4  # two samples a microbatch, in float32
    assert sizes_of(work, "forward_bytes") == [hidden] * 3
    assert sizes_of(work, "backward_bytes") == [hidden] * 3


def test_program_computes_what_the_rank_computes_eagerly():
    model, _, batch = make()
    part, part_step = program_of_rank(model, step, 2)
    with communicating(OneRank()):  # the fake process group's all-reduce changes nothing, either
        found = part_step(part, batch)
        found.backward()
    expected = step(model, batch)
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        if "up" in name or "down.weight" in name:
            gradient = dict(part.named_parameters())[name].grad
            torch.testing.assert_close(gradient, parameter.grad.to_local())


def test_plan_of_a_parallelized_model(tmp_path, capsys):
    file = tmp_path / "plan.json"
    given = ["--model", FACTORY, "--cluster", "4xA100-80GB", "--microbatches", "2", "--mesh", "pp=2,dp=1", "--tp", "2"]
    assert main(["plan", *given, "--schedule", "1f1b", "--budget", "50", "--out", str(file), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tensor"] == 2
    assert answer["tensor_reduction_share"] > 0
    assert json.loads(file.read_text())["mesh"]["tensor"] == 2


def test_gathers_and_scatters_of_sequence_parallel_layouts_count_as_half_of_an_all_reduce():
    work = model_work(planned_model(f"{__name__}:sequence_parallel", 2, empty=True, tensor=2).operators)
    forward = sizes_of(work, "forward_bytes")
    assert forward == [2 * TOKENS * HIDDEN * 4 / 2] * 6


@pytest.mark.parametrize(
    ("factory", "tensor", "said"),
    [
        ("make", 4, r"'.*' is a DTensor on DeviceMesh.*: --tp 4 needs a mesh of one dimension with 4 ranks"),
        ("make", 1, "returns a model with DTensor parameters over 2 ranks: give --tp 2"),
        ("whole", 2, "returns a model without DTensor parameters: apply parallelize_module"),
        ("of_maximum", 2, "the model's layouts need all_reduce of 'max' between tensor ranks: sums, all-gathers and"),
    ],
)
def test_unsupported_layout_is_refused(factory, tensor, said):
    with pytest.raises(RequestError, match=said):
        planned_model(f"{__name__}:{factory}", 2, empty=True, tensor=tensor)
