"""A pipeline is equal, to the last bit, to its captured graph, unsplit, over the same microbatches."""

import itertools

import pytest
import torch
from attrs import evolve
from panpipe.core.capture.export.operators import Operators
from panpipe.core.capture.graph.randomness import random_key
from panpipe.runtimes.batch.losses import mean_loss
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.microbatches import split_batch
from panpipe.runtimes.programs.compiled import compile_stages
from panpipe.runtimes.programs.stage_run import StageRun
from panpipe.runtimes.update.stage_state import StageState
from torch import nn

from ..support.cuts import captured, even_plan, irregular_plan
from ..support.models import BY_NAME
from ..support.parity import build

F32 = torch.float32


def one_placeholder_a_reader(operators: Operators) -> dict[str, str]:
    """Give every node that reads a parameter a separate placeholder; their names → the parameter's."""
    graph, parameters = operators.step.graph, operators.step.parameters
    for placeholder in [node for node in graph.nodes if node.name in parameters]:
        for number, reader in enumerate(list(placeholder.users)[1:]):
            with graph.inserting_after(placeholder):
                own = graph.placeholder(f"{placeholder.name}_{number}")
            reader.replace_input_with(placeholder, own)
            parameters[own.name] = parameters[placeholder.name]
            operators.values[own.name] = operators.values[placeholder.name]
    readers = dict(parameters)
    operators.step.parameters = {name: name for name in readers}
    return readers


def unsplit(name: str, rows: int, microbatches: int) -> tuple[float, dict[str, dict[int, torch.Tensor]]]:
    """Loss, and for every parameter the gradient through each node that reads it, of the whole graph as one stage.

    A tied weight's partial gradients are kept apart by reader, because a plan adds them up stage by stage.
    """
    case = BY_NAME[name]
    operators = captured(case, F32, rows, microbatches)
    readers = one_placeholder_a_reader(operators)
    compiled = compile_stages(operators, [[node.name for node in operators.graph.nodes]], [0])
    programs = compiled.programs[0]
    model = case.model(F32)
    values = dict(model.named_parameters())
    own = {p: nn.Parameter(values[readers[p]].detach().clone()) for p in programs.inputs.parameters}
    state = StageState(own, {n: b for n, b in model.named_buffers() if n in programs.inputs.buffers}, None)
    run = StageRun(0, compiled, state)
    losses, shares = [], []
    with torch.no_grad():
        for m, piece in enumerate(split_batch(case.batch(rows, F32), microbatches)):
            key, seed = random_key(3, 0, m), torch.tensor(piece.weight)
            _, results = run.forward(m, [], piece.leaves, key)
            run.backward(m, {}, seed, piece.leaves, key)
            losses.append(results[0].clone())
            shares.append(piece.weight)
    nodes = list(operators.step.graph.nodes)
    order = {
        node.name: nodes.index(next(iter(node.users))) for node in nodes if node.op == "placeholder" and node.users
    }
    gradients: dict[str, dict[int, torch.Tensor]] = {}
    for placeholder, parameter in own.items():
        gradients.setdefault(readers[placeholder], {})[order[placeholder]] = parameter.grad
    return mean_loss(losses, shares, weighted=False)[0], gradients


OPTIONS = [{}, {"split": True}, {"schedule_name": "interleaved-1f1b", "chunks": 2}]
RECOMPUTING = [{"recompute": None}, {"schedule_name": "v-half", "chunks": 2, "recompute": None}]


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        pytest.param(devices, options, marks=[pytest.mark.slow] * (devices == 3))
        for devices, options in itertools.product((2, 3), OPTIONS)
    ]
    + [pytest.param(2, RECOMPUTING[0], marks=pytest.mark.slow), (2, RECOMPUTING[1])],
    ids=str,
)
@pytest.mark.parametrize("name", ["tied gpt with dropout", "batchnorm with a skip", "layers over time"])
def test_loss_and_gradients_have_the_bits_of_the_unsplit_graph(name, devices, options):
    operators = captured(BY_NAME[name], F32, 8, 4)
    check_bits(name, even_plan(operators, devices, 4, **options))


@pytest.mark.parametrize(
    "placement",
    [(1, 0, 0, 2, 0, 1), *(pytest.param(each, marks=pytest.mark.slow) for each in ((1, 0, 1, 0, 0), (3, 1, 3)))],
    ids=str,
)
def test_devices_with_any_stages_in_any_order_have_the_bits_of_the_unsplit_graph(placement):
    """Unequal numbers of stages, neighbours on one device, a first stage on the last device, empty devices."""
    name = "tied gpt with dropout"
    check_bits(name, irregular_plan(captured(BY_NAME[name], F32, 8, 4), placement, 4))


def test_every_cut_of_layers_with_other_orders_of_dimensions_has_the_bits_of_the_unsplit_graph():
    operators = captured(BY_NAME["layers over time"], F32, 8, 4)
    names = [node.name for node in operators.graph.nodes]
    assert len(names) > 5
    plan = even_plan(operators, 2, 4)
    for end in range(1, len(names)):
        cut = (names[:end], names[end:])
        stages = tuple(evolve(stage, nodes=tuple(nodes)) for stage, nodes in zip(plan.stages, cut, strict=True))
        check_bits("layers over time", evolve(plan, stages=stages))


def check_bits(name, plan):
    """A step of the plan has the loss and the gradients of the unsplit graph."""
    loss, gradients = unsplit(name, 8, 4)
    case, devices = BY_NAME[name], plan.devices
    pipe = build(ThreadTeam(devices), name, F32, 8, evolve(plan), 4)
    found = pipe.step(case.batch(8, F32))
    assert torch.equal(found, loss)
    mine = dict(pipe._session.model.named_parameters())
    for key, partial in gradients.items():
        # The first stage that reads the parameter has the placeholder that the graph reads first.
        total = None
        for _, gradient in sorted(partial.items()):
            total = gradient if total is None else total + gradient
        assert torch.equal(mine[key].grad, total), key
