"""Cutting a stage out of the captured graph: what it reads, sends and returns, and its device."""

import pytest
import torch
from panpipe.core.capture.programs.joint_graph import StageModule
from panpipe.core.capture.programs.stage import (
    KEY,
    Boundary,
    boundaries,
    order_by_strides,
    set_device,
    stage_graph,
    with_device,
)
from torch import fx, nn

from ....support.stages.graphs import cut, operators, stages

F32 = torch.float32


class Net(nn.Module):
    """Has a tied weight, a buffer, a constant and a skip connection over a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.middle.weight
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.table = torch.arange(4.0)

    def forward(self, x):
        skip = self.first(x)
        return self.last(self.middle(skip).tanh()) + skip * self.scale + self.table


def step(model, batch):
    return model(batch["x"]).mean(), 1.0, {"top": batch["x"].amax()}


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    return operators(Net(), step, {"y": torch.ones(1), "x": torch.ones(2, 3)})


@pytest.fixture(scope="module")
def three(found):
    return stages(found, 1, 2)


def test_messages_between_stages_have_shape_dtype_and_differentiability(found):
    pairs = boundaries(found, cut(found, 1, 2))
    assert {pair: [(b.shape, b.dtype, b.differentiable) for b in each] for pair, each in pairs.items()} == {
        (0, 1): [((2, 4), F32, True)],
        (0, 2): [((2, 4), F32, True)],
        (1, 2): [((2, 4), F32, True)],
    }
    assert pairs[0, 1] == pairs[0, 2]
    assert list(pairs) == sorted(pairs)


def test_no_messages_within_one_stage(found):
    assert boundaries(found, cut(found)) == {}


def test_inputs_of_each_stage(three):
    first, second, third = (stage.inputs for stage in three)
    assert [len(inputs.boundary) for inputs in (first, second, third)] == [0, 1, 2]
    assert [set(inputs.parameters) for inputs in (first, second, third)] == [
        {"first.weight", "first.bias"}, {"middle.weight", "middle.bias"}, {"middle.weight", "last.bias"}
    ]  # fmt: skip
    assert [inputs.buffers for inputs in (first, second, third)] == [(), (), ("scale",)]
    assert [len(inputs.constants) for inputs in (first, second, third)] == [0, 0, 1]
    assert [inputs.batch for inputs in (first, second, third)] == [(1,), (), (1,)]  # the metric is computed at the end
    assert not any(inputs.random for inputs in (first, second, third))


def test_outputs_are_what_later_stages_read_and_results_what_the_step_returns(three):
    first, second, third = three
    assert first.outputs == second.inputs.boundary
    assert set(third.inputs.boundary) == {*first.outputs, *second.outputs}
    assert [stage.results for stage in (first, second)] == [(), ()]
    assert len(third.results) == 2  # loss and metric
    assert third.outputs == ()


def test_fakes_are_in_the_order_of_the_placeholders(three):
    for stage in three:
        placeholders = [node for node in stage.graph.nodes if node.op == "placeholder"]
        assert len(placeholders) == len(stage.fakes)
    (fake,) = three[1].fakes[:1]
    assert (tuple(fake.shape), fake.requires_grad) == ((2, 4), True)


def test_stages_compute_what_the_step_computes(three):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 3)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def run(stage, received):
        inputs = stage.inputs
        given = [
            *(received[b.name] for b in inputs.boundary),
            *(state[n] for n in (*inputs.parameters, *inputs.buffers)),
        ]
        given += [*[model.table] * len(inputs.constants), *[x] * len(inputs.batch)]
        made = StageModule(stage)(*given)
        received.update({b.name: value for b, value in zip(stage.outputs, made, strict=False)})
        return made

    received = {}
    loss, top = [run(stage, received) for stage in three][-1]
    wanted, _, metrics = step(model, {"x": x})
    assert torch.equal(loss, wanted)
    assert torch.equal(top, metrics["top"])
    assert loss.requires_grad
    assert not top.requires_grad


def test_random_key_is_the_last_input_of_stages_that_draw():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3), nn.Dropout(0.5))
    parts = stages(operators(model, lambda model, batch: model(batch).mean(), torch.ones(2, 3)), 1, 2)
    assert [stage.inputs.random for stage in parts] == [True, False, True]
    assert [list(stage.first_draw.values()) for stage in parts] == [[0], [], [1]]
    last = [node.name for node in parts[0].graph.nodes if node.op == "placeholder"][-1]
    assert last == KEY
    assert (tuple(parts[0].fakes[-1].shape), parts[0].fakes[-1].dtype) == ((3,), torch.int64)


def test_tensor_without_a_gradient_is_sent_detached():
    def step(model, batch):
        hidden = model(batch)
        return (hidden.detach().exp() + hidden).mean()

    found = operators(nn.Linear(4, 4), step, torch.ones(4, 4))
    names = [node.name for node in found.graph.nodes]
    where = next(i for i, name in enumerate(names) if "add" in name)
    stage = stages(found, where)[0]
    by_gradient = {b.differentiable: node.target for b, node in zip(
        stage.outputs, stage.graph.output_node().args[0], strict=True)}  # fmt: skip
    assert by_gradient[False] is torch.ops.aten.detach.default
    assert set(by_gradient) == {True, False}


def test_view_of_another_output_is_sent_as_a_copy():
    def step(model, batch):
        hidden = model(batch)
        shown = hidden.view(2, 8)
        return hidden.exp().mean() + shown.sin().mean()

    found = operators(nn.Linear(4, 4), step, torch.ones(4, 4))
    stage = stages(found, 1)[0]
    assert {b.shape for b in stage.outputs} == {(4, 4), (2, 8)}
    returned = [node.target for node in stage.graph.output_node().args[0]]
    assert returned.count(torch.ops.aten.clone.default) == 1


class Attention(nn.Module):
    """Its last ``view`` is possible only if queries keep their strides between stages."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).view(2, 3, 2, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        heads = nn.functional.scaled_dot_product_attention(q * 2, k.sin(), v)
        return self.out(heads.transpose(1, 2).view(2, 3, 8))


def test_messages_keep_the_strides_of_transposed_tensors():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 3, 8)
    found = operators(model, lambda model, batch: model(batch).square().mean(), x)
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    orders = set()
    for place in range(1, len(found.graph.nodes)):
        first, second = stages(found, place)
        given = [dict(model.named_parameters())[name] for name in first.inputs.parameters]
        sent = StageModule(first)(*given, *[x] * len(first.inputs.batch))
        assert all(tensor.is_contiguous() for tensor in sent)
        assert [tuple(tensor.shape) for tensor in sent] == [b.shape for b in first.outputs]
        orders |= {b.order for b in first.outputs}
        by_name = {b.name: tensor for b, tensor in zip(first.outputs, sent, strict=True)}
        given = [by_name[b.name] for b in second.inputs.boundary]
        given += [dict(model.named_parameters())[name] for name in second.inputs.parameters]
        (made,) = StageModule(second)(*given, *[x] * len(second.inputs.batch))
        assert torch.equal(made, loss)
        for one, wanted in zip(torch.autograd.grad(made, list(model.parameters())), gradients, strict=True):
            assert torch.equal(one, wanted)
    assert orders == {(), (0, 2, 1, 3)}


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.empty(2, 3, 4), ()),
        (torch.empty(4, 3, 2).permute(2, 0, 1), (1, 2, 0)),
        (torch.empty(4, 3, 6).transpose(0, 2)[:2], (2, 1, 0)),  # with gaps
        (torch.empty(3, 1, 5).transpose(0, 2), (2, 1, 0)),
        (torch.empty(3, 1).t(), ()),  # the stride of one element says nothing
        (torch.empty(3, 2).t().unsqueeze(0).expand(4, 2, 3), ()),  # elements that share memory
        (torch.empty(()), ()),
    ],
)
def test_dimensions_of_a_message_are_in_the_order_of_the_strides(tensor, order):
    assert order_by_strides(tensor) == order


def test_view_of_a_received_tensor_is_sent_on_as_a_copy():
    def step(model, batch):
        turned = model(batch).view(2, 2, 4).transpose(0, 1)
        other = model(batch.cos())
        most = turned.amax(0)
        shown, between = turned[1], other.sin()
        return most.sum() + between.sum() + shown.exp().sum()

    found = operators(nn.Linear(4, 4), step, torch.ones(4, 4))
    count, sent_on = len(found.graph.nodes), 0
    for first in range(1, count - 1):
        for second in range(first + 1, count):
            middle = stages(found, first, second)[1]
            made = StageModule(middle)(*middle.fakes)[: len(middle.outputs)]
            sent_on += any(b.order for b in middle.inputs.boundary) and any(b.shape == (2, 4) for b in middle.outputs)
            given = {fake.untyped_storage() for fake in middle.fakes}
            assert not given & {tensor.untyped_storage() for tensor in made}
    assert sent_on


def test_devices_in_arguments_are_replaced_by_one_of_their_type():
    cuda, one = torch.device("cuda"), torch.device("cuda", 1)
    assert with_device((cuda, [torch.device("cpu"), {"d": cuda}, 3]), one) == (
        one,
        [torch.device("cpu"), {"d": one}, 3],
    )
    graph = fx.Graph()
    node = graph.call_function(torch.zeros, (2,), {"device": cuda})
    set_device(graph, one)
    assert node.kwargs == {"device": one}
    assert node.args == (2,)


def test_stage_on_another_device_has_its_fakes_there(found):
    meta = stage_graph(found, cut(found), 0, torch.device("cpu"))
    assert all(fake.device.type == "cpu" for fake in meta.fakes)
    other = stage_graph(found, cut(found), 0, torch.device("cuda", 1))
    assert all(fake.device.type == "cpu" for fake in other.fakes)  # tensors of another type stay
    assert other.graph is not meta.graph


def test_boundary_is_compared_by_value():
    assert Boundary("a", (1,), F32, True) == Boundary("a", (1,), F32, True) != Boundary("a", (1,), F32, False)
