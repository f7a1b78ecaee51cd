"""Code between divided modules that would not compute what one process does is refused when it is recorded."""

import pytest
import torch
import torch.distributed as dist
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.core.tensor_collectives import OneRank, communicating
from panpipe.runtimes.tensor_parallel.recording import program_of_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

SAMPLES, TOKENS, HIDDEN, HEADS = 2, 6, 16, 4
SIZE = HIDDEN // HEADS


@pytest.fixture(autouse=True)
def mesh():
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


class Block(nn.Module):
    """Attention or MLP: what is between the divided modules is given."""

    def __init__(self, inner):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.one = nn.Linear(HIDDEN, SIZE)
        self.inner = inner

    def forward(self, x):
        return x + self.o(self.inner(self, x))


def heads(x):
    return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)


def attention(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2)


def run(mesh, inner, layouts=None):
    model = Block(inner)
    columns = {name: ColwiseParallel() for name in "qkv"}
    parallelize_module(model, mesh, {**columns, "o": RowwiseParallel(), **(layouts or {})})
    parts, step = program_of_rank(model, lambda model, batch: model(batch["x"]).square().mean(), 2)
    with communicating(OneRank()):
        return step(parts, {"x": torch.randn(SAMPLES, TOKENS, HIDDEN)})


def of_own_heads(block, x):
    """Code with the number of heads of one rank, which does not run in one process."""
    return attention(
        *(part(x).view(SAMPLES, TOKENS, HEADS // 2, SIZE).transpose(1, 2) for part in (block.q, block.k, block.v))
    )


def merged_single_heads(block, x):
    """Each rank has one head, so its part does not show which dimension is divided."""
    q, k, v = (part(x).unflatten(-1, (-1, HIDDEN // 2)).transpose(1, 2) for part in (block.q, block.k, block.v))
    return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(-2)


def written(block, x):
    """A tensor of which slices are written."""
    y = torch.zeros(SAMPLES, TOKENS, HIDDEN // 2)
    y[:, 1:] = block.q(x)[:, :-1]
    return y


def merged(block, x):
    """Attention with samples and heads in one dimension."""
    q, k, v = (heads(part(x)).reshape(-1, TOKENS, SIZE) for part in (block.q, block.k, block.v))
    y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
    return y.view(SAMPLES, -1, TOKENS, SIZE).transpose(1, 2).flatten(-2)


def one_key_head(block, x):
    """Every rank has the one head of keys and values, repeated for its own heads of queries."""
    q, k = heads(block.q(x)), heads(block.one(x))
    k = k[:, :, None].expand(-1, -1, q.shape[1], -1, -1).reshape(q.shape)
    return attention(q, k, k)


@pytest.mark.parametrize(
    "inner",
    [
        lambda block, x: attention(*(heads(part(x)) for part in (block.q, block.k, block.v))),
        lambda block, x: F.silu(block.q(x)) * block.k(x) + torch.ones(TOKENS, HIDDEN // 2),
        lambda block, x: heads(block.q(x)).softmax(-1).transpose(1, 2).flatten(-2),
        merged,
        merged_single_heads,
        written,
        of_own_heads,
        one_key_head,
    ],
    ids=[
        "attention",
        "gated",
        "softmax of heads",
        "merged heads",
        "merged single heads",
        "written",
        "own heads",
        "one key head",
    ],
)
def test_code_that_computes_with_parts_is_recorded(mesh, inner):
    assert run(mesh, inner).shape == ()


def of_whole_heads(block, x):
    q, k, v = (part(x).view(SAMPLES, -1, HEADS, SIZE).transpose(1, 2) for part in (block.q, block.k, block.v))
    return attention(q, k, v).reshape(SAMPLES, TOKENS, -1)


def of_more_than_the_heads(block, x):
    return block.q(x).view(SAMPLES, TOKENS, HEADS, SIZE).flatten(-2)


def with_slopes(block, x):
    q, k, v = (heads(part(x)) for part in (block.q, block.k, block.v))
    return attention(q, k, v, torch.arange(q.shape[1]).view(-1, 1, 1) * torch.ones(TOKENS, TOKENS))


def with_two_key_heads(block, x):
    q = block.q(x).unflatten(-1, (-1, 2)).transpose(1, 2)
    k = block.one(x).unflatten(-1, (-1, 2)).transpose(1, 2).repeat_interleave(2, 1)
    return attention(q, k, k)


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (
            of_whole_heads,
            r"view of \(2, 6, 8\) that is one of 2 ranks' parts of dimension 2: its result has shape .*heads",
        ),
        (
            of_more_than_the_heads,
            r"view of \(2, 6, 8\) .*dimension 2: RuntimeError: shape .* is invalid.*number of heads",
        ),
        (
            lambda block, x: torch.cat(block.q(x).chunk(2, -1), -1),
            r"split of \(2, 6, 8\) that is one of 2 ranks' parts",
        ),
        (lambda block, x: block.q(x).softmax(-1), r"_softmax of .* parts of dimension 2: its result is not"),
        (lambda block, x: F.layer_norm(block.q(x), (8,)), r"native_layer_norm of .* parts of dimension 2"),
        (lambda block, x: block.q(x) / block.q(x).square().mean(-1, True).sqrt(), r"sqrt of .*ranks still have to sum"),
        (with_slopes, r"add of \(2, 2, 6, 6\) that is one of 2 ranks' parts of dimension 1 and \(2, 6, 6\)"),
        (with_two_key_heads, r"\S*attention\S* of \(2, 4, 6, 2\) that is one of 2 ranks' parts of dimension 1 and"),
    ],
)
def test_code_that_needs_more_than_parts_is_refused_at_its_line(mesh, inner, said):
    with pytest.raises(RequestError, match=rf"{__name__.rpartition('.')[2]}.py:\d+: {said}"):
        run(mesh, inner)


def test_module_that_takes_a_part_as_whole_is_refused(mesh):
    layouts = {"q": ColwiseParallel(output_layouts=Shard(1)), "o": RowwiseParallel(input_layouts=Replicate())}
    with pytest.raises(RequestError, match=r"a module takes a tensor of shape \(2, 3, 16\) as .*input_layouts"):
        run(mesh, lambda block, x: block.q(x), layouts)


def test_uneven_parts_of_an_activation_are_refused(mesh):
    """torch gathers them as if all were as large as the first one."""
    layouts = {"q": ColwiseParallel(output_layouts=Shard(1)), "o": RowwiseParallel(input_layouts=Shard(1))}
    with pytest.raises(RequestError, match=r"returns a tensor of shape \(2, 5, 16\) with layout Shard\(dim=1\) over 2"):
        run(mesh, lambda block, x: block.q(x[:, 1:]), layouts)


def test_step_that_returns_a_part_is_refused(mesh):
    model = parallelize_module(nn.Sequential(nn.Linear(HIDDEN, HIDDEN)), mesh, {"0": ColwiseParallel()})
    parts, step = program_of_rank(model, lambda model, batch: model(batch).square().mean(), 2)
    with pytest.raises(RequestError, match=r"the step returns a number that 2 tensor ranks .*Replicate"):
        step(parts, torch.randn(SAMPLES, HIDDEN))


def test_padding_of_a_divided_embedding_is_a_row_of_one_rank_alone(mesh):
    for padding, mine in ((1, None), (5, 1)):  # this rank has rows 4 to 7
        model = nn.Sequential(nn.Embedding(8, 3, padding_idx=padding))
        parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
        parts, step = program_of_rank(model, lambda model, batch: model(batch).sum(), 2)
        assert list(operators_of(capture_step(parts, step, torch.arange(8)[None])).graph.nodes)
        with communicating(OneRank()):
            step(parts, torch.arange(8)[None]).backward()
        without = [row for row, found in enumerate(parts.get_parameter("0.weight").grad) if not found.any()]
        assert without == ([] if mine is None else [mine])


def test_attention_whose_mask_needs_a_gradient_is_recorded_with_a_kernel_that_has_one(mesh):
    def inner(block, x):
        bias = block.one(x).mean(0).sum(-1)[None, None, None]
        return attention(*(heads(part(x)) for part in (block.q, block.k, block.v)), bias.expand(1, 1, TOKENS, TOKENS))

    with communicating(OneRank()):
        run(mesh, inner).backward()


def test_mixed_tensors_are_refused_with_the_line_and_the_fix(mesh):
    with pytest.raises(RequestError, match=r"test_layout_watch.py:\d+ .*mixed .*; a divided module .*use_local_output"):
        run(mesh, lambda block, x: block.q(x) + x[..., :1], {"q": ColwiseParallel(use_local_output=False)})
