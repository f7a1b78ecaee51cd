"""Batches of any container class: leaves, names, and the same classes afterwards."""

import collections
import dataclasses
import enum
import types

import numpy as np
import pytest
import torch
from panpipe.core.capture.values.containers import flatten_batch, one_level
from panpipe.core.errors import RequestError
from torch.nn.utils.rnn import pack_sequence

X, Y = torch.zeros(2), torch.ones(3)


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    label: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Encoding(collections.UserDict):
    """As of tokenizers: with an attribute that is no item."""

    def __init__(self, data, kind):
        super().__init__(data)
        self.kind = kind


class Colour(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", ["x", "y"])


def leaves_of(batch):
    leaves, nesting = flatten_batch(batch)
    return [id(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], nesting


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({"x": X, "rest": [Y, 3]}, ("batch['rest'][0]", "batch['rest'][1]", "batch['x']")),
        (Pair(X, Y), None),
        (Sample(X, 2), ("batch['label']", "batch['x']")),
        (Encoding({"x": X}, "words"), ("batch['x']",)),
        ([Sample(X), {"deep": (Encoding({"y": Y}, "words"),)}], None),
        (Frozen(X), ("batch['x']",)),
        (X, ("batch",)),
    ],
    ids=str,
)
def test_batch_of_other_leaves_is_nested_as_the_given_one(batch, names):
    leaves, nesting = flatten_batch(batch)
    again = nesting.batch(leaves)
    assert type(again) is type(batch)
    assert leaves_of(again)[0] == leaves_of(batch)[0]
    assert names is None or tuple(sorted(nesting.names)) == names
    other = nesting.batch([leaf + 1 if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
    assert leaves_of(other)[1] == nesting  # the structure is one, whatever the leaves
    assert hash(leaves_of(other)[1]) == hash(nesting)


def test_attributes_that_are_no_fields_are_kept_and_the_given_batch_stays():
    batch = Encoding({"x": X}, "words")
    leaves, nesting = flatten_batch([batch])
    (found,) = nesting.batch([leaf + 1 for leaf in leaves])
    assert (found.kind, found["x"].tolist()) == ("words", [1, 1])
    assert batch["x"] is X


def test_values_of_a_batch_are_leaves():
    values = [1, 2.5, "text", None, Colour.RED, torch.float32, slice(2)]
    assert [leaf for leaf in flatten_batch(values)[0] if leaf is not None] == [v for v in values if v is not None]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": np.zeros(2)}, r"batch\['x'\] is a numpy ndarray: a batch holds tensors; convert it"),
        ([Sample(object())], r"batch\[0\]\['x'\] is a builtins.object, whose tensors are unknown"),
        (types.SimpleNamespace(x=X), "batch is a types.SimpleNamespace, whose tensors are unknown"),
        ({"x": pack_sequence([Y, X])}, r"batch\['x'\] is a PackedSequence.* give the padded tensor and the lengths"),
    ],
)
def test_what_holds_unknown_tensors_is_refused_by_name(batch, said):
    with pytest.raises(RequestError, match=said) as error:
        flatten_batch(batch)
    assert "\n" not in str(error.value)


def test_one_level_of_a_container_is_named():
    children, _ = one_level({"a": [X], "b": Y}, "batch")
    assert list(children) == ["batch['a']", "batch['b']"]
    assert children["batch['a']"] == [X]
    assert one_level(X, "batch") is None
