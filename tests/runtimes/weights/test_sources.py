"""Sources of values: initialisation by module names and seeds, incomplete initialisation, and checkpoints first."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.weights import weights_from
from panpipe.runtimes.weights.sources import places
from safetensors.torch import save_file
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.tied = self.second
        self.norm = nn.BatchNorm1d(3)


def on_meta(kind=Net):
    with torch.device("meta"):
        return kind()


def filled(model, names=None, given=None, seed=0):
    """Values of some of a model's tensors, or of all."""
    source = weights_from(given, model, seed)
    wanted = list(places(model)) if names is None else names
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    held = {name: torch.empty_like(state[name], device="cpu") for name in wanted}
    held = {n: nn.Parameter(t) if isinstance(state[n], nn.Parameter) else t for n, t in held.items()}
    source.fill(held, wanted)
    return held


def test_places_have_every_tensor_once_under_its_first_name():
    found = places(Net())
    assert list(found)[:3] == ["first.weight", "first.bias", "second.weight"]
    assert [place.name for place in found["second.weight"]] == ["second.weight", "tied.weight"]
    assert (found["norm.running_mean"][0].kind, found["first.bias"][0].kind) == ("buffer", "parameter")
    assert all(held[0].persistent for held in found.values())


def test_values_depend_on_the_seed_and_the_modules_name_alone():
    everything, again, other = filled(on_meta()), filled(on_meta()), filled(on_meta(), seed=1)
    part = filled(on_meta(), ["second.weight", "first.bias"])
    assert all(torch.equal(everything[name], again[name]) for name in everything)
    assert all(torch.equal(everything[name], part[name]) for name in part)
    assert not torch.equal(everything["first.weight"], other["first.weight"])
    assert not torch.equal(everything["first.weight"], everything["second.weight"])
    assert everything["norm.running_var"].tolist() == [1.0] * 3


def test_initialisation_leaves_the_random_numbers_of_the_user_and_the_model_as_they_were():
    model = on_meta()
    torch.manual_seed(5)
    filled(model)
    drawn = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(2))
    assert all(tensor.is_meta for tensor in model.parameters())


def test_function_of_the_users_initialises_each_module():
    def init(module):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(2.0)

    found = filled(on_meta(), ["first.weight", "second.weight"], init)
    assert {value for tensor in found.values() for value in tensor.flatten().tolist()} == {2.0}


@pytest.mark.parametrize(
    ("init", "said"),
    [
        (
            lambda module: None,
            r"init\(module\) of module 'first' \(Linear\) left parameter 'first\.weight' without",
        ),
        (
            lambda module: setattr(module, "weight", nn.Parameter(torch.zeros(2, 2))),
            r"left parameter 'weight' of shape \(2, 2\): it must have values in shape \(3, 3\)",
        ),
    ],
)
def test_initialisation_that_leaves_something_out_is_refused(init, said):
    with pytest.raises(RequestError, match=said):
        filled(on_meta(), ["first.weight"], init)


def test_module_without_an_initialisation_is_refused_before_planning():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    weights_from(None, Own(), 0).check(["scale"])  # it has values
    with pytest.raises(RequestError, match=r"parameter 'scale' is on the meta device, and its Own has no reset_param"):
        weights_from(None, on_meta(Own), 0).check(["scale"])


def test_checkpoint_overwrites_what_it_has_under_any_name_and_the_rest_is_initialised(tmp_path):
    path, model = tmp_path / "one.safetensors", on_meta()
    save_file({"tied.weight": torch.full((3, 3), 7.0), "first.weight": torch.zeros(3, 3)}, path)
    source = weights_from(path, model, 0)
    assert [source.overwrites(name) for name in ("second.weight", "first.bias")] == [True, False]
    found = filled(model, ["second.weight", "norm.running_var"], path)
    assert found["second.weight"].tolist() == [[7.0] * 3] * 3
    assert found["norm.running_var"].tolist() == [1.0] * 3
    with pytest.raises(RequestError, match=r"lacks parameter 'first\.bias'"):
        source.check(["first.weight", "first.bias"])


@pytest.mark.parametrize("given", [3, [1.0]])
def test_other_weights_are_refused(given):
    with pytest.raises(RequestError, match=r"weights is .*: give None, the path"):
        weights_from(given, Net(), 0)
