"""Parts of a model that the example's step does not use have a stage; later steps train them as eager PyTorch does."""

import pytest
import torch
from panpipe.core.capture.export.carry_over import Cut
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.training.plan_setup import stages_of_unused
from torch import fx, nn

from ...support.launch import results
from ...support.programs.unused_parts import ADAM, SGD, Early, distances, fit, part_programs


@pytest.mark.filterwarnings("ignore:.*the loss does not depend on it")
@pytest.mark.parametrize("optimizer", [ADAM, SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("make", part_programs.values(), ids=list(part_programs))
def test_parts_that_the_example_does_not_use_train_later(make, optimizer):
    assert max(distances(ThreadTeam(2), make, optimizer).values()) < 1e-12


@pytest.mark.filterwarnings("ignore:.*the loss does not depend on it")
def test_a_part_in_a_stage_that_is_too_early_is_refused_with_its_line_and_a_fix():
    def make():
        torch.manual_seed(0)
        return Early().double(), fit

    said = (
        r"unused_parts\.py:\d+: '/mul' uses 'scale', which is in stage 0 because the example's step does not use it .*"
        r"register it in a module between those that run before and after it"
    )
    with pytest.raises(RequestError, match=said):
        distances(ThreadTeam(2), make, SGD)


@pytest.mark.parametrize(("ranks", "mesh"), [
    (2, "pp=2"),
    pytest.param(4, "pp=2,dp=2", marks=pytest.mark.slow),
])  # fmt: skip
def test_parts_train_later_over_ranks(ranks, mesh, tmp_path):
    for found in results("unused_parts", tmp_path, ranks, MESH=mesh):
        for name, distance in found.items():
            assert distance < 1e-12, name


class Step:
    """A captured step that reads some buffers."""

    def __init__(self, *read):
        self.graph, self.buffers = fx.Graph(), {}
        for name in read:
            node = self.graph.placeholder(name.replace(".", "_"))
            self.graph.call_function(torch.neg, (node,))
            self.buffers[node.name] = name


def stages(model, *used, read=()):
    """The stages of unused tensors, where each stage uses the parameters of some modules."""
    names = [name for name, _ in model.named_parameters()]
    parameters = tuple(frozenset(n for n in names if n.startswith(tuple(f"{m}." for m in each))) for each in used)
    found = stages_of_unused(model, Step(*read), Cut((), parameters, {}))
    return {name.removesuffix(".weight"): stage for name, stage in found.items() if not name.endswith("bias")}


def linear(*names):
    return nn.ModuleDict({name: nn.Linear(1, 1) for name in names})


def test_stage_is_that_of_the_last_used_parameter_before_it():
    assert stages(linear("a", "b", "c", "d"), ["a"], ["c"]) == {"b": 0, "d": 1}


def test_stage_is_that_of_the_first_used_parameter_after_it_where_none_is_before():
    assert stages(linear("a", "b", "c"), [], ["b"], ["c"]) == {"a": 1}


def test_neighbours_in_the_innermost_module_come_first():
    model = nn.ModuleDict({"heads": linear("a", "b"), "body": linear("c"), "more": linear("d")})
    assert stages(model, ["body"], ["heads.b"]) == {"heads.a": 1, "more.d": 0}


def test_buffers_of_an_unused_module_are_placed_with_its_parameters():
    model = nn.ModuleDict({"used": nn.BatchNorm1d(1), "other": nn.BatchNorm1d(1)})
    model.register_buffer("table", torch.zeros(1))
    found = stages(model, [], ["used"], read=["used.running_mean"])
    assert found == {"other": 1, "other.running_mean": 1, "other.running_var": 1, "other.num_batches_tracked": 1}


def test_a_parameter_on_meta_has_no_stage():
    model = linear("a", "b")
    model["b"].to("meta")
    assert stages(model, ["a"]) == {}
