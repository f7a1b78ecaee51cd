"""What users change of a model between steps: replaced parameters, assigned buffers, written and frozen ones."""

import pytest
import torch
from attrs import evolve
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import Stage, TiedWeight
from panpipe.runtimes.training.model_changes import KnownTensors, TiedCopies, follow_trained, refuse_strays
from panpipe.runtimes.update.stage_state import StageState
from torch import nn

from ...support.plans import orders, plan_of

WHEN = "between steps 2 and 3"


def model():
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made[1].register_buffer("none", None)
    return made


def replaced(module):
    module[0].weight = nn.Parameter(torch.zeros(2, 2))


def both_replaced(module):
    replaced(module)
    module[0].bias = nn.Parameter(torch.zeros(2))


def replaced_by_another_name(module):
    module.append(module[0])
    module[0] = nn.Identity()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replaced, r"between steps 2 and 3 parameter '0\.weight' was replaced by another one"),
        (both_replaced, r"parameter '0\.weight' and 1 more were replaced by other ones"),
        (
            replaced_by_another_name,
            r"parameter '0\.weight' and 1 more were replaced by parameter '2\.weight' and 1 more",
        ),
        (lambda module: module.double(), r"parameter '0\.weight' became torch\.float64 and was torch\.float32"),
    ],
)
def test_other_parameters_are_refused_by_name(change, said):
    module = model()
    known = KnownTensors(module)
    change(module)
    with pytest.raises(RequestError, match=said) as error:
        known.refuse_replaced_parameters(module, WHEN)
    assert "\n" not in str(error.value)


def test_parameters_that_are_gone_or_new_alone_are_accepted():
    module = model()
    known = KnownTensors(module)
    known.refuse_replaced_parameters(module, WHEN)
    module.append(nn.Linear(2, 2))
    known.refuse_replaced_parameters(module, WHEN)
    del module[2], module[0]
    module.insert(0, nn.Identity())
    known.refuse_replaced_parameters(module, WHEN)


def test_assigned_buffers_are_written_into_the_ones_that_stages_hold():
    module = model()
    held, known = module[1].running_mean, KnownTensors(module)
    assert not known.write_back_buffers(WHEN)
    module[1].running_mean = torch.tensor([3.0, 4.0])
    assert known.write_back_buffers(WHEN)
    assert module[1].running_mean is held
    assert held.tolist() == [3.0, 4.0]
    assert not known.write_back_buffers(WHEN)


def test_assigned_buffer_that_carries_a_gradient_leaves_none_in_the_one_that_stages_hold():
    module = model()
    held, known = module[1].running_mean, KnownTensors(module)
    module[1].running_mean = torch.tensor([3.0, 4.0], requires_grad=True) * 2
    known.write_back_buffers(WHEN)
    assert held.tolist() == [6.0, 8.0]
    assert not held.requires_grad


def test_buffer_on_meta_is_put_back_without_values():
    module = model().to("meta")
    held, known = module[1].running_mean, KnownTensors(module)
    module[1].running_mean = torch.empty(2, device="meta")
    assert known.write_back_buffers(WHEN)
    assert module[1].running_mean is held


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2).double()])
def test_buffer_of_another_shape_or_dtype_is_refused(other):
    module = model()
    known = KnownTensors(module)
    module[1].running_var = other
    with pytest.raises(RequestError, match=r"buffer '1\.running_var' was assigned torch\.float\d+ \(.*\) and was"):
        known.write_back_buffers(WHEN)


def test_what_is_written_into_a_tied_weight_reaches_its_other_stages():
    first, second, alone = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    tied = TiedCopies({1: {"w": second}, 0: {"w": first, "v": alone}})
    with torch.no_grad():
        second.fill_(9.0)
    tied.follow()
    assert second.tolist() == [9.0, 9.0]  # the user's own was not written
    with torch.no_grad():
        first.fill_(5.0)
        alone.fill_(7.0)
    tied.follow()
    assert second.tolist() == [5.0, 5.0]
    first.data = torch.tensor([1.0, 2.0])
    tied.follow()
    assert second.tolist() == [1.0, 2.0]


class State:
    """Of a stage: its parameters, and those that its optimizer steps."""

    def __init__(self, parameters, trained):
        self.parameters, self.trained = parameters, set(trained)

    def trains(self, name):
        return name in self.trained

    def join(self, name):
        self.trained.add(name)


def stages(*names, tied=()):
    plan = plan_of(orders(*(f"{s}F0 {s}B0" for s in range(len(names)))), range(len(names)), tied=tied)
    return evolve(plan, stages=tuple(Stage(i, i, (f"n{i}",), own) for i, own in enumerate(names)))


def test_stages_freeze_and_unfreeze_with_the_model():
    module = model()
    state = State(
        {"0.weight": nn.Parameter(torch.zeros(2, 2)), "0.bias": nn.Parameter(torch.zeros(2), False)}, ["0.weight"]
    )
    plan = stages(("0.weight", "0.bias"))
    module[0].weight.requires_grad_(False)
    assert follow_trained(module, plan, {0: state}, whole_update=False)  # the bias is trained in the model
    assert not state.parameters["0.weight"].requires_grad
    assert state.parameters["0.bias"].requires_grad
    assert state.trained == {"0.weight", "0.bias"}
    module[0].weight.requires_grad_(True)
    assert not follow_trained(module, plan, {0: state}, whole_update=False)  # its gradient has memory already
    assert state.parameters["0.weight"].requires_grad


@pytest.mark.parametrize(
    ("plan", "whole_update", "said"),
    [
        (stages(("0.weight",)), True, "clip_norm= or scaler= was set up without it"),
        (stages(("0.weight",), ("0.weight",)), False, "several stages read it, and the plan sums no gradients"),
    ],
)
def test_unfrozen_parameter_that_cannot_join_is_refused(plan, whole_update, said):
    state = State({"0.weight": nn.Parameter(torch.zeros(2, 2), False)}, [])
    with pytest.raises(RequestError, match=rf"parameter '0\.weight' was unfrozen and {said}"):
        follow_trained(model(), plan, {0: state}, whole_update)


def test_unfrozen_tied_weight_joins():
    state = State({"0.weight": nn.Parameter(torch.zeros(2, 2), False)}, [])
    plan = stages(("0.weight",), ("0.weight",), tied=(TiedWeight("0.weight", (0, 1), 16),))
    assert follow_trained(model(), plan, {0: state}, whole_update=False)
    assert state.trained == {"0.weight"}


def unnamed_sgd(named):
    return torch.optim.SGD([parameter for _, parameter in named])


def test_parameter_of_another_stage_in_an_optimizer_is_refused():
    module = model()
    first = StageState({"0.weight": module[0].weight, "0.bias": module[0].bias}, {}, unnamed_sgd)
    second = StageState({"1.weight": module[1].weight}, {}, unnamed_sgd)
    states = {0: first, 1: second}
    assert first.optimizer is not None
    assert second.optimizer is not None
    refuse_strays(module, states)
    second.optimizer.add_param_group({"params": [module[0].bias]})
    for _ in range(2):
        with pytest.raises(RequestError, match=r"parameter '0\.bias' was added to the optimizer of stage 1, which has"):
            refuse_strays(module, states)


def test_tensor_of_no_stage_in_an_optimizer_is_refused():
    module = model()
    state = StageState({"0.weight": module[0].weight}, {}, unnamed_sgd)
    assert state.optimizer is not None
    state.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(RequestError, match=r"a tensor of shape \(3,\) was added to the optimizer of stage 0"):
        refuse_strays(module, {0: state})
