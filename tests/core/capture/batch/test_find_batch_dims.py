"""Where the samples of a batch are: in dimension 0, checked by tracing with another number of them, or given."""

import re
from typing import Any

import pytest
import torch
from panpipe.core.capture.batch.find_batch_dims import find_batch_dims
from panpipe.core.capture.values.containers import flatten_batch
from panpipe.core.errors import RequestError
from torch import nn
from torch.nn import functional as F

N, S, D = 8, 6, 8
LABELS = torch.zeros(N, dtype=torch.long)


class Encoder(nn.Module):
    """Attention over a sequence, and a linear layer."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=batch_first)
        self.head = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.attention(x, x, x, attn_mask=mask)[0])


class Recurrent(nn.Module):
    """The last state of a sequence-first LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][-1]


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def label_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"], batch.get("mask")).flatten(0, 1), batch["y"].flatten())


def weigh_classes(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], weight=batch["weights"])


def look_up(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["table"][batch["ids"]]), batch["y"])


def select(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"])[batch["m"]], batch["y"][batch["m"]])


def convolve_by_sample(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch["x"]
    filters = model(x.new_ones(len(x), D)).view(-1, 1, 3, 3).repeat_interleave(3, 0)
    return F.conv2d(x.flatten(0, 1)[None], filters, groups=3 * len(x)).mean()


def square() -> torch.Tensor:
    return torch.randn(N, N, D)


def tokens(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


RECT = {"x": torch.randn(N, D), "y": LABELS}

FOUND = {
    "selection of unknown size": (
        nn.Linear(D, D), select, {"x": square(), "y": tokens(N, N), "m": torch.ones(N, N, dtype=torch.bool)},
    ),
    "images as high as the batch is large": (
        nn.Conv2d(N, 4, 3, padding=1), classify, {"x": torch.randn(N, N, N, N), "y": tokens(N, N, N)},
    ),
    "batch statistics": (
        nn.Sequential(nn.Conv1d(N, N, 3, padding=1), nn.BatchNorm1d(N)),
        lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]),
        {"x": torch.randn(N, N, N), "y": torch.randn(N, N, N)},
    ),
    "a filter of its own for each image": (nn.Linear(D, 9), convolve_by_sample, {"x": torch.randn(N, 3, S, S)}),
    "divided by the number of samples": (
        nn.Linear(D, D), lambda model, batch: model(batch["x"]).square().sum() / (len(batch["x"]) * D), RECT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_samples_are_in_dimension_0(case: str) -> None:
    model, step, batch = FOUND[case]
    found = find_batch_dims(model, step, batch)
    assert set(found.by_name.values()) == {0}
    assert not found.lists


SHARED = {
    "not read": ({"x": torch.randn(N, D), "y": LABELS, "id": LABELS, "names": "abc", "none": None}, {"names", "none"}),
    "one row": ({"x": torch.randn(N, D), "y": LABELS, "w": torch.ones(1, D)}, {"w"}),
    "no dimension": (
        {"x": torch.randn(N, D), "y": LABELS, "scale": torch.tensor(2.0), "number": 3},
        {"scale", "number"},
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_values_and_single_rows_are_shared(case: str) -> None:
    batch, shared = SHARED[case]
    found = find_batch_dims(nn.Linear(D, D), classify, batch).by_name
    assert found == {f"batch['{key}']": None if key in shared else 0 for key in batch}


def test_a_tensor_in_the_place_of_a_list_is_cut_by_rows() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(torch.stack(list(batch["xs"]))).mean()

    batch = {"xs": [torch.randn(D) for _ in range(N)]}
    with pytest.raises(RequestError, match="batch_dims='samples'"):
        find_batch_dims(nn.Linear(D, D), step, batch)
    known = find_batch_dims(nn.Linear(D, D), step, batch, given={"xs": "samples"})
    found = find_batch_dims(nn.Linear(D, D), step, {"xs": torch.randn(N, D)}, given=known)
    assert found.by_name == {"batch['xs']": 0}


class Bags(nn.Module):
    """Sums of embeddings, each of the tokens between two offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(10, D)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(words, offsets)


def pool_graphs(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(torch.zeros_like(batch["y"]).index_add(0, batch["of"], model(batch["x"])), batch["y"])


def assert_rows(model: nn.Module, batch: Any) -> torch.Tensor:
    assert len(batch["x"]) == N, "all of them"
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Packed(nn.Module):
    """Attention within the samples of a packed batch, which end where ``ends`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        sample = torch.bucketize(torch.arange(len(x)), ends, right=True)
        q = self.linear(x)[None, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=sample[:, None] == sample)[0, 0]


REFUSED = {
    "offsets": (
        Bags(), lambda model, batch: F.cross_entropy(model(batch["t"], batch["o"]), batch["y"]),
        {"t": tokens(20), "o": torch.arange(N), "y": LABELS}, "its size is not the same", None,
    ),
    "nodes summed into graphs that have a label each": (
        nn.Linear(D, D), pool_graphs, {"x": torch.randn(N, D), "of": torch.arange(N) // 2, "y": torch.randn(4, D)},
        "if batch['x'] has 2 rows for each sample of batch['y'], give it in the shape (4, 2, ...)", None,
    ),
    "flattened targets": (
        nn.Linear(D, D), lambda model, batch: F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"]),
        {"x": torch.randn(N, 3, D), "y": tokens(3 * N)}, "has 3 rows for each sample of batch['x']", None,
    ),
    "packed documents": (
        Packed(), lambda model, batch: F.mse_loss(model(batch["x"], batch["ends"]), batch["y"]),
        {"x": torch.randn(12, D), "ends": torch.tensor([4, 7, 12]), "y": torch.randn(12, D)}, "its size is not", None,
    ),
    "one sequence": (
        Packed(), lambda model, batch: F.mse_loss(model(batch["x"], batch["ends"]), batch["y"]),
        {"x": torch.randn(12, D), "ends": torch.arange(12), "y": torch.randn(12, D)}, "as a sequence", None,
    ),
    "table": (
        nn.Linear(D, D), look_up, {"table": torch.randn(N, D), "ids": LABELS, "y": torch.randn(N, D)},
        "index reads rows of the batch", {"table": None, "ids": 0, "y": 0},
    ),
    "mask": (
        Encoder(True), label_tokens, {"mask": torch.zeros(N, N), "x": square(), "y": tokens(N, N)},
        "shape of the 2D attn_mask", {"mask": None, "x": 0, "y": 0},
    ),
    "class weights": (
        nn.Linear(D, N), weigh_classes, {"x": torch.randn(N, D), "y": LABELS, "weights": torch.ones(N)},
        "weight tensor should be defined", {"x": 0, "y": 0, "weights": None},
    ),
    "fewer class weights": (
        nn.Linear(D, 3), weigh_classes, {"x": torch.randn(N, D), "y": LABELS, "weights": torch.ones(3)},
        "its size is not the same", {"x": 0, "y": 0, "weights": None},
    ),
    "class weights in tuples, with a number": (
        nn.Linear(D, 3), lambda model, batch: F.cross_entropy(model(batch[0][0]), batch[0][1], batch[1]) * batch[2],
        ((torch.randn(N, D), LABELS), torch.ones(3), 0.5), "its size is not the same", ((0, 0), None, None),
    ),
    "sequence first": (
        Encoder(False), label_tokens, {"x": torch.randn(S, N, D), "y": tokens(S, N)}, "as a sequence", 1,
    ),
    "recurrent": (
        Recurrent(), classify, {"x": torch.randn(S, N, D), "y": LABELS}, "its size is not the same", {"x": 1, "y": 0},
    ),
    "a number of samples in the code": (
        nn.Linear(D, D), lambda model, batch: F.cross_entropy(model(batch["x"].view(N, D)), batch["y"]),
        RECT, "invalid for input of size 24 (with 3 of 8 samples, as in a microbatch): change that line", None,
    ),
    "ready-made microbatches": (
        nn.Linear(D, D), classify, [RECT, RECT], "give one whole batch, which panpipe cuts into microbatches", None,
    ),
    "no rows": (nn.Linear(D, D), lambda model, batch: model(batch["x"]).mean(), {"x": torch.tensor(1.0)}, "no tensor",
                None),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_batch_that_cannot_be_cut_is_refused_with_the_reason(case: str) -> None:
    model, step, batch, reason, suggested = REFUSED[case]
    with pytest.raises(RequestError, match=re.escape(reason)) as refused:
        find_batch_dims(model, step, batch, microbatches=3)
    text = str(refused.value)
    assert "\n" not in text
    assert ("such as batch_dims=" in text) == (suggested is not None), text
    if suggested is not None:
        assert f"such as batch_dims={suggested}" in text
        found = find_batch_dims(model, step, batch, given=suggested, microbatches=3)
        assert 0 in found.by_name.values() or suggested == 1
    if case != "no rows":
        find_batch_dims(model, step, batch, microbatches=1)  # nothing is cut


def test_step_that_asserts_its_number_of_samples_is_refused_without_advice_for_dimensions() -> None:
    said = (
        r"test_find_batch_dims.py:\d+ in assert_rows: all of them \(with 3 of 8 samples, as in a microbatch\): change "
        r"that line so that it accepts them, or the batch or the number of microbatches$"
    )
    with pytest.raises(RequestError, match=said):
        find_batch_dims(nn.Linear(D, D), assert_rows, RECT, microbatches=3)


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (torch.zeros(2).numpy(), r"batch\['x'\] is a numpy ndarray.*torch.as_tensor"),
        (object(), r"batch\['x'\] is a builtins.object.*register_pytree_node"),
        ({1, 2}, r"batch\['x'\] is a builtins.set"),
    ],
)
def test_unknown_classes_are_refused_by_name(leaf: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        flatten_batch({"x": leaf})


def refuse_other_sizes(rows: int) -> None:
    """As a queue of N entries does, of which each batch replaces a part."""
    if N % rows:
        raise ValueError(f"{rows} does not divide {N}")


def test_step_that_accepts_few_batch_sizes_has_all_tensors_cut():
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        refuse_other_sizes(batch["x"].shape[0])
        return F.mse_loss(model(batch["x"]), batch["y"])

    dims = find_batch_dims(nn.Linear(D, D), step, {"x": torch.randn(N, D), "y": torch.randn(N, D)})
    assert dims.by_name == {"batch['x']": 0, "batch['y']": 0}


def scatter_images(model: nn.Module, batch: Any) -> torch.Tensor:
    """Features of images, visited one by one, in place of some tokens, as in models of images and text."""
    features = torch.cat([model(image) for image in batch["images"]])
    tokens = batch["tokens"].masked_scatter(batch["tokens"] > 0, features)
    return F.mse_loss(model(tokens), batch["y"])


def test_images_that_are_scattered_into_the_samples_are_cut_with_them():
    batch = {"images": torch.randn(N, S, D), "tokens": torch.randn(N, 12, D), "y": torch.randn(N, 12, D)}
    found = find_batch_dims(nn.Linear(D, D), scatter_images, batch)
    assert dict(found.leaves) == {"batch['images']": 0, "batch['tokens']": 0, "batch['y']": 0}
