"""The program of one tensor rank, recorded over torch's fake process group: what it computes and what is refused."""

import pytest
import torch
import torch.distributed as dist
from panpipe.core.capture.export.step import capture_step, symbolic_sizes
from panpipe.core.errors import RequestError
from panpipe.core.tensor_collectives import ALL_REDUCE, communicating
from panpipe.runtimes.tensor_parallel.recording import program_of_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


class Doubling:
    """Collectives of two ranks that have the same values."""

    def all_reduce(self, part, operation):
        part.mul_(2 if operation == "sum" else 1)


@pytest.fixture(autouse=True)
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


class Model(nn.Module):
    """Two layers, the first divided by columns and the second by rows; this rank has the first halves."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)
        self.register_buffer("scale", torch.ones(()))
        self.whole = [self.up.weight.detach().clone(), self.down.weight.detach().clone()]
        for layer, dim in ((self.up, 0), (self.down, 1)):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(dim)]))
        self.calls = 0

    def forward(self, x):
        x = DTensor.from_local(x, self.up.weight.device_mesh, [Replicate()], run_check=False)
        return self.down(self.up(x).relu()).full_tensor() * self.scale


def step(model, batch):
    return model(batch["x"]).pow(2).mean()


BATCH = {"x": torch.randn(2, 3, generator=torch.Generator().manual_seed(1))}


def recorded(mesh, function=step):
    model = Model(mesh)
    parts, of_rank = program_of_rank(model, function, 2)
    return model, parts, of_rank


def graphs(of_rank):
    return list(of_rank._known.values())


def test_program_computes_with_the_parts_and_one_all_reduce(mesh):
    model, parts, of_rank = recorded(mesh)
    with communicating(Doubling()):
        loss = of_rank(parts, BATCH)
        loss.backward()
    up, down = model.whole
    up, down = up[:2].clone().requires_grad_(), down[:, :2].clone().requires_grad_()
    wanted = (2 * ((BATCH["x"] @ up.t()).relu() @ down.t())).pow(2).mean()
    assert loss.item() == pytest.approx(wanted.item())
    (graph,) = graphs(of_rank)
    assert [node.target for node in graph.graph.nodes].count(ALL_REDUCE) == 1
    assert dict(parts.named_parameters())["down.weight"].grad is not None


def test_operators_without_gradients_have_none_in_the_program(mesh):
    def with_constant(model, batch):
        with torch.no_grad():
            factor = model(batch["x"]).abs().sum()
        return step(model, batch) * factor

    _, parts, of_rank = recorded(mesh, with_constant)
    _, plain_parts, plain = recorded(mesh)
    with communicating(Doubling()):
        found, wanted = of_rank(parts, BATCH), plain(plain_parts, BATCH)
        found.backward()
        wanted.backward()
    factor = found.detach() / wanted.detach()
    mine, theirs = (dict(each.named_parameters())["up.weight"].grad for each in (parts, plain_parts))
    torch.testing.assert_close(mine, factor * theirs)  # the gradient of a product would have a second part


@pytest.mark.parametrize(("code", "serves"), [(torch.relu, True), (lambda part: part.squeeze(1), False)])
def test_program_of_all_lengths_serves_parts_of_one_token_unless_they_lose_a_dimension(mesh, code, serves):
    def in_slices(model, batch):
        whole = DTensor.from_local(batch["x"], mesh, [Replicate()], run_check=False)
        part = code(whole.redistribute(placements=[Shard(1)]).to_local())
        return model(DTensor.from_local(part, mesh, [Shard(1)], run_check=False).full_tensor()).mean()

    _, parts, of_rank = recorded(mesh, in_slices)
    with symbolic_sizes(parts=True):
        captured = capture_step(parts, of_rank, {"x": torch.ones(2, 4, 3)}, symbolic={0: [1]})
    assert captured.sizes.values({0: (2, 6, 3)}) is not None
    assert (captured.sizes.values({0: (2, 2, 3)}) is not None) == serves
    assert captured.sizes.values({0: (2, 1, 3)}) is None


def refused(mesh, function, said):
    _, parts, of_rank = recorded(mesh, function)
    with pytest.raises(RequestError, match=said) as refusal:
        of_rank(parts, BATCH)
    assert "\n" not in str(refusal.value)


def test_step_that_changes_python_values_is_refused(mesh):
    def counting(model, batch):
        model.calls += 1
        return step(model, batch) * model.calls

    refused(
        mesh, counting, r"the step changes '.*calls', which was 0 and is 2: steps of models with DTensor parameters"
    )


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_users_own_backward_is_refused(mesh):
    refused(mesh, lambda model, batch: Square.apply(step(model, batch)), "the step calls the autograd function Square")


def test_values_of_tensors_are_refused(mesh):
    def branching(model, batch):
        loss = step(model, batch)
        return loss if loss > 0 else 2 * loss

    refused(mesh, branching, "the step cannot be recorded over DTensors: .*run without values of tensors")


def test_divided_buffer_is_refused(mesh):
    model = Model(mesh)
    model.scale = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    with pytest.raises(
        RequestError, match=r"buffer 'scale' has layout Shard\(dim=0\): plans support divided parameters, and"
    ):
        program_of_rank(model, step, 2)


def test_several_meshes_are_refused(mesh):
    model = Model(mesh)
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    model.up.weight = nn.Parameter(distribute_tensor(model.whole[0], other, [Shard(0)]))
    with pytest.raises(RequestError, match="the parameters of Model are DTensors on several meshes"):
        program_of_rank(model, step, 2)
