"""Parameters that another rank holds: what describes them is there, and whatever needs their values is refused."""

import copy
import io
import pickle

import numpy as np
import panpipe
import pytest
import torch
from panpipe.runtimes.weights.remote_tensors import as_meta_tensors, make_remote
from torch import nn
from torch.optim.swa_utils import AveragedModel


def held():
    """A layer whose weight and buffer another rank holds, and the weight that it had before."""
    layer = nn.Linear(3, 4)
    before = layer.weight
    layer.weight = nn.Parameter(before.detach().to("meta"))
    layer.register_buffer("count", torch.zeros(3, device="meta"))
    for tensor, name in ((layer.weight, "fc.weight"), (layer.count, "fc.count"), (before, "fc.weight")):
        make_remote(tensor, name, "rank 1")
    return layer, layer.weight, before


def test_remote_parameter_has_shape_and_dtype():
    layer, weight, _ = held()
    assert weight.shape == weight.size() == (4, 3)
    assert (weight.dtype, weight.device.type, weight.ndim, weight.dim()) == (torch.float32, "meta", 2, 2)
    assert (weight.numel(), len(weight), weight.nbytes, weight.stride()) == (12, 4, 48, (3, 1))
    assert weight.is_meta
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.is_floating_point()
    assert isinstance(weight, nn.Parameter)
    assert {weight: 1}[weight] == 1
    assert dict(layer.named_parameters())["weight"] is weight
    weight.requires_grad_(False)
    weight.requires_grad = True
    weight.grad = None
    assert sum(p.numel() for p in layer.parameters()) == 16


def test_remote_parameter_prints_the_rank_that_holds_it():
    layer, weight, before = held()
    for text in (repr(weight), str(weight), f"{before}", repr(layer.state_dict()["weight"])):
        assert text == "<'fc.weight' of shape (4, 3), float32, held by rank 1>"


A = torch.zeros(4, 3)
USES = {
    "arithmetic": lambda layer, p: p + 1,
    "arithmetic from the right": lambda layer, p: 1 - p,
    "arithmetic in place": lambda layer, p: p.mul_(2),
    "average of it": lambda layer, p: A.mul_(0.9).add_(p, alpha=0.1),
    "lerp of it": lambda layer, p: A.lerp_(p, 0.1),
    "several at once": lambda layer, p: torch._foreach_mul_([A, p], 1.0),
    "averaged model": lambda layer, p: AveragedModel(layer),
    "data": lambda layer, p: p.data,
    "set data": lambda layer, p: setattr(p, "data", A),
    "gradient": lambda layer, p: p.grad,
    "set gradient": lambda layer, p: setattr(p, "grad", A),
    "clip norm": lambda layer, p: nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
    "clip value": lambda layer, p: nn.utils.clip_grad_value_(layer.parameters(), 1.0),
    "optimizer": lambda layer, p: torch.optim.SGD(layer.parameters(), 0.1).step(),
    "item": lambda layer, p: p[0, 0].item(),
    "write an element": lambda layer, p: p.__setitem__(0, 1.0),
    "list": lambda layer, p: p.tolist(),
    "numpy": lambda layer, p: p.numpy(),
    "array": lambda layer, p: np.asarray(p),
    "norm": lambda layer, p: torch.linalg.vector_norm(p),
    "isnan": lambda layer, p: torch.isnan(p).any(),
    "equal": lambda layer, p: torch.equal(p, p),
    "truth": lambda layer, p: bool(p),
    "iterate": lambda layer, p: list(p),
    "copy from it": lambda layer, p: A.copy_(p),
    "copy to it": lambda layer, p: p.copy_(A),
    "clone": lambda layer, p: p.clone(),
    "detached": lambda layer, p: p.detach().cpu(),
    "state_dict": lambda layer, p: layer.state_dict()["weight"] + 1,
    "torch.save": lambda layer, p: torch.save(layer.state_dict(), io.BytesIO()),
    "pickle": lambda layer, p: pickle.dumps(p),
    "deepcopy": lambda layer, p: copy.deepcopy(layer),
    "copy": lambda layer, p: copy.copy(p),
    "to": lambda layer, p: layer.to("cpu"),
    "half": lambda layer, p: layer.half(),
    "storage": lambda layer, p: p.untyped_storage(),
    "hook": lambda layer, p: p.register_hook(print),
    "hook after accumulation": lambda layer, p: p.register_post_accumulate_grad_hook(print),
    "forward": lambda layer, p: layer(torch.zeros(2, 3)),
    "initialise": lambda layer, p: nn.init.normal_(p),
    "vector": lambda layer, p: nn.utils.parameters_to_vector(layer.parameters()),
    "buffer": lambda layer, p: layer.count + 1,
    "view": lambda layer, p: p.view(-1),
    "stack": lambda layer, p: torch.stack([p]),
    "keyword": lambda layer, p: torch.add(input=A, other=p),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("stale", [False, True])
def test_operations_on_the_values_of_a_remote_parameter_are_refused_by_name(use, stale):
    layer, weight, before = held()
    with pytest.raises(panpipe.RequestError, match=r"'fc\.\w+' is held by rank 1, .*pipe\.save\(\)"), torch.no_grad():
        use(layer, before if stale else weight)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("stale", [False, True])
def test_zero_grad_changes_nothing_of_a_remote_parameter(to_none, stale):
    layer, weight, before = held()
    layer.bias.grad = torch.ones(4)
    layer.zero_grad(to_none)
    assert layer.bias.grad is None if to_none else not layer.bias.grad.any()
    optimizer = torch.optim.AdamW([before if stale else weight, layer.bias], 0.1)
    optimizer.zero_grad(to_none)
    with pytest.raises(panpipe.RequestError, match="'grad' would be lost or wrong"):
        optimizer.step()


def test_load_state_dict_into_a_remote_parameter_is_refused_by_name():
    layer, _, _ = held()
    state = {"weight": A, "bias": torch.zeros(4), "count": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"'fc\.weight' is held by rank 1"), pytest.warns(UserWarning, match="meta"):
        layer.load_state_dict(state)


def test_capture_sees_remote_parameters_as_meta_tensors():
    layer, weight, _ = held()
    with as_meta_tensors(layer):
        assert type(layer.weight) is nn.Parameter
        assert type(layer.count) is torch.Tensor
        assert (layer.weight + 1).is_meta
    assert layer.weight is weight
    with pytest.raises(panpipe.RequestError):
        weight + 1
