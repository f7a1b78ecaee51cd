"""The attributes of modules that hold parameters and buffers."""

import torch
from panpipe.runtimes.weights.places import Place, places, tensor_at
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)


def test_every_tensor_has_all_its_places_under_its_first_name():
    model = Tied()
    found = places(model)
    assert list(found) == ["embed.weight", "mean", "scratch"]
    assert [place.name for place in found["embed.weight"]] == ["embed.weight", "head.weight"]
    assert all(tensor_at(place) is model.embed.weight for place in found["embed.weight"])


def test_place_is_described_for_messages():
    model = Tied()
    found = places(model)
    assert found["embed.weight"][1].described == "module 'head' (Linear)"
    assert found["mean"][0].described == "Tied"
    assert [found[name][0].kind for name in found] == ["parameter", "buffer", "buffer"]
    assert [found[name][0].persistent for name in found] == [True, True, False]
    assert Place("", model, "mean").name == "mean"
