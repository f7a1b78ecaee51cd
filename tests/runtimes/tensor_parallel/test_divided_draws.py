"""Random numbers of one tensor rank, recorded over torch's fake process group: the part of those of one process."""

import pytest
import torch
import torch.distributed as dist
from panpipe.core.capture.graph.randomness import KeyedRandom, random_key
from panpipe.core.errors import RequestError
from panpipe.core.tensor_collectives import communicating
from panpipe.runtimes.tensor_parallel.recording import program_of_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

RANK, RANKS, HEADS, SIZE = 1, 2, 4, 6
BATCH = {"x": torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)).double()}


class OneOfTwo:
    rank = RANK


@pytest.fixture(autouse=True)
def mesh():
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.norm, self.drop = nn.Linear(8, HEADS * SIZE), nn.LayerNorm(8), nn.Dropout(0.5)
        self.mask = torch.ones(4, 4).tril().bool()


def heads(model, batch):
    """(batch, heads, positions, size)"""
    return model.q(batch["x"]).unflatten(-1, (-1, SIZE)).transpose(1, 2)


def rank_of_step(mesh, step, layouts):
    model, whole = parallelize_module(Layers().double(), mesh, layouts), Layers().double()
    if "q" in layouts:  # the fake group scatters nothing
        for name, parameter in model.q.named_parameters():
            parameter.detach().to_local().copy_(getattr(whole.q, name).detach().chunk(RANKS)[RANK])
    parts, of_rank = program_of_rank(model, step, RANKS)
    with communicating(OneOfTwo()):
        of_rank(parts, BATCH)  # recorded
        with KeyedRandom(random_key(0, 0, 0)):
            return of_rank(parts, BATCH)


def one_process(step):
    model = Layers().double()
    with KeyedRandom(random_key(0, 0, 0)):
        return step(model, BATCH)


def check(mesh, step, dim, outer=1, layouts=None):
    """The result of one rank is its part of the result of one process."""
    found = rank_of_step(mesh, step, layouts or {"q": ColwiseParallel()})
    whole = one_process(step)
    part = whole.unflatten(dim, (outer, RANKS, -1)).select(dim + 1, RANK).flatten(dim, dim + 1)
    torch.testing.assert_close(found, part)
    other = whole.unflatten(dim, (outer, RANKS, -1)).select(dim + 1, 1 - RANK).flatten(dim, dim + 1)
    assert not torch.equal(part, other)


def test_attention(mesh):
    def fused(model, batch):
        q = heads(model, batch)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True)

    def by_hand(model, batch):
        q = heads(model, batch)
        scores = (q @ q.transpose(-1, -2) / SIZE**0.5).masked_fill(~model.mask, float("-inf"))
        return F.dropout(F.softmax(scores, -1, dtype=torch.float32).to(q.dtype), 0.5) @ q

    check(mesh, fused, 1)
    check(mesh, by_hand, 1)


def test_repeated_heads_and_rotated_halves(mesh):
    def step(model, batch):
        q = heads(model, batch)
        first, second = q.chunk(2, -1)
        q = torch.cat([-second, first], -1) + F.layer_norm(q, (SIZE,)) + q.square().mean(-1, keepdim=True)
        return F.dropout(q[:, :, None].expand(-1, -1, 2, -1, -1).reshape(3, -1, 4, SIZE), 0.5)

    check(mesh, step, 1)


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        torch.randn_like,
        lambda x: torch.empty_like(x).uniform_(-1, 1),
        lambda x: torch.zeros_like(x).normal_() + x,
        lambda x: F.alpha_dropout(x, 0.5),
    ],
)
def test_draws_of_other_kinds(mesh, draw):
    check(mesh, lambda model, batch: draw(heads(model, batch)), 1)


def test_dtensors(mesh):
    """The result of the layer stays a DTensor."""
    layouts = {"q": ColwiseParallel(use_local_output=False)}

    def dropped(model, batch):
        found = model.drop(model.q(batch["x"]))
        return found.to_local() if hasattr(found, "to_local") else found

    def dropped_part(model, batch):
        found = model.q(batch["x"])
        return model.drop(getattr(found, "_local_tensor", found))

    check(mesh, dropped, 2, layouts=layouts)
    check(mesh, dropped_part, 2, layouts=layouts)


def test_slices_of_a_sequence(mesh):
    layouts = {"norm": SequenceParallel(), "drop": SequenceParallel()}

    def step(model, batch):
        slices = batch["x"].chunk(RANKS, 1)[RANK] if model.drop._forward_hooks else batch["x"]
        found = model.drop(model.norm(slices))
        return found.to_local() if hasattr(found, "to_local") else found

    check(mesh, step, 1, layouts=layouts)


def test_draws_of_whole_tensors_are_those_of_one_process(mesh):
    def step(model, batch):
        x = model.drop(batch["x"]) + torch.rand(4, 8)
        return x, model.q(x)

    found, _ = rank_of_step(mesh, step, {"q": ColwiseParallel()})
    wanted, _ = one_process(step)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        # Its sizes are those of the part.
        (lambda model, batch: torch.rand(heads(model, batch).shape), "aten.rand.default draws random numbers for a"),
        # The ranks still have to sum it.
        (
            lambda model, batch: torch.rand_like(heads(model, batch).sum(1)),
            "draws random numbers for a tensor of which",
        ),
        (
            lambda model, batch: model.drop(heads(model, batch).flip(1)),
            "flip of .* parts of dimension 1: its",
        ),
        (lambda model, batch: model.drop(model.q(batch["x"]).view(3, 4, 2, SIZE)), "cannot be run with whole param"),
        (lambda model, batch: torch.bernoulli(heads(model, batch).sigmoid()), "draws random numbers for a tensor of"),
    ],
)
def test_draws_whose_part_is_not_known_are_refused(mesh, step, said):
    with pytest.raises(RequestError, match=said) as refusal:
        rank_of_step(mesh, step, {"q": ColwiseParallel()})
    assert "\n" not in str(refusal.value)
