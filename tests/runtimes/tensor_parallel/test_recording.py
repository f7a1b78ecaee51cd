"""The program of one tensor rank, recorded over torch's fake process group: what it computes and what is refused."""

import pytest
import torch
import torch.distributed as dist
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


def test_parts_have_the_names_of_the_model_and_half_of_its_parameters(mesh):
    model, parts, of_rank = recorded(mesh)
    assert {name: tuple(p.shape) for name, p in parts.named_parameters()} == {
        "up.weight": (2, 3),
        "down.weight": (3, 2),
    }
    assert of_rank.recorded_from == (model, step)


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


def test_program_is_recorded_once_for_each_shape_and_python_value(mesh):
    def with_python(model, batch):
        return step(model, batch) * (2 if model.calls else 1)

    model, parts, of_rank = recorded(mesh, with_python)
    with communicating(Doubling()):
        first = of_rank(parts, BATCH)
        of_rank(parts, {"x": BATCH["x"] + 1})
        assert len(graphs(of_rank)) == 1
        of_rank(parts, {"x": BATCH["x"][:1]})
        assert len(graphs(of_rank)) == 2
        model.calls = 1
        assert of_rank(parts, BATCH).item() == pytest.approx(2 * first.item())
        assert len(graphs(of_rank)) == 3


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


def test_other_function_of_the_model_has_its_own_program(mesh):
    _, parts, of_rank = recorded(mesh)
    other = of_rank.of(lambda model, batch: model(batch["x"]).sum())
    with communicating(Doubling()):
        assert other(parts, BATCH).item() != of_rank(parts, BATCH).item()
    assert len(graphs(other)) == len(graphs(of_rank)) == 1


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


def test_replicated_buffers_are_whole_on_each_rank(mesh):
    class Scaled(Model):
        """As torch makes it: the buffers of a module that is divided are replicated."""

        def forward(self, x):
            x = DTensor.from_local(x, self.up.weight.device_mesh, [Replicate()], run_check=False)
            return self.down(self.up(x).relu() * self.scale).full_tensor()

    model = Scaled(mesh)
    model.scale = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
    parts, of_rank = program_of_rank(model, step, 2)
    assert torch.equal(parts.scale, torch.tensor(3.0))
    assert not hasattr(parts.scale, "to_local")
    assert parts.scale.data_ptr() == model.scale.to_local().data_ptr()
    up, down = model.whole
    wanted = (2 * ((BATCH["x"] @ up[:2].t()).relu() * 3) @ down[:, :2].t()).pow(2).mean()
    with communicating(Doubling()):
        torch.testing.assert_close(of_rank(parts, BATCH), wanted)


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
