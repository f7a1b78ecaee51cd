"""Where the samples of a batch are: found by tracing with another number of them, or given, or asked for."""

import dataclasses
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from panpipe.core.capture.batch.find_batch_dims import MAX_TRACES, find_batch_dims
from panpipe.core.capture.values.containers import flatten_batch
from panpipe.core.errors import RequestError
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

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


def contrast(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["a"]) @ model(batch["b"]).T, torch.arange(len(batch["a"])))


def mix_up(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch["x"]
    return F.cross_entropy(model(0.5 * x + 0.5 * x[torch.randperm(len(x))]), batch["y"])


def stop_at_nan(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = classify(model, batch)
    if torch.isnan(loss).any():
        raise ValueError("the loss is not a number")
    return loss


def show(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = classify(model, batch)
    print(f"loss {loss:.3f} of {loss.item():>8.2f}", loss, loss.tolist(), batch["x"][:1, :1].tolist())
    return loss


def check_targets(model: nn.Module, batch: Any) -> torch.Tensor:
    if batch["y"].max() >= D or (batch["y"] < 0).any():
        raise ValueError("a target is no class")
    if not batch["x"].isfinite().all():
        raise ValueError("an input is not finite")
    return classify(model, batch)


def check_sizes(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch["x"]
    assert x[x > -99].numel() == x.numel()
    torch._check(x[x.isfinite()].numel() == x.numel(), lambda: "not finite")
    return classify(model, batch)


def take_plain(model: nn.Module, batch: Any) -> torch.Tensor:
    """Refuses every subclass of a tensor, fake ones among them."""
    assert type(batch["x"]) is torch.Tensor
    print("mean", batch["x"].mean())
    return classify(model, batch)


def select(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"])[batch["m"]], batch["y"][batch["m"]])


def collate(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = default_collate(batch)
    return F.cross_entropy(model(x), y)


def pad(model: nn.Module, batch: Any) -> torch.Tensor:
    x = nn.utils.rnn.pad_sequence([sample["x"] for sample in batch], batch_first=True)
    return F.cross_entropy(model(x).mean(1), torch.stack([sample["y"] for sample in batch]))


def penalize_separately(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["real"]).mean() - model(batch["noise"]).mean()


def regress(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def square() -> torch.Tensor:
    return torch.randn(N, N, D)


def tokens(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def class_centers(model: nn.Module, batch: Any) -> torch.Tensor:
    found = model(batch["x"])
    sums = torch.zeros(D, D).index_add(0, batch["y"], found)
    counts = torch.zeros(D).scatter_add(0, batch["y"], torch.ones_like(batch["y"], dtype=found.dtype))
    return F.mse_loss(found, (sums / counts.clamp(min=1)[:, None])[batch["y"]])


FOUND = {
    "all rows": (nn.Linear(D, D), classify, {"x": torch.randn(N, D), "y": LABELS}, {"x": 0, "y": 0}),
    "mask first, as many rows": (
        Encoder(True), label_tokens, {"mask": torch.zeros(N, N), "x": square(), "y": tokens(N, N)},
        {"mask": None, "x": 0, "y": 0},
    ),
    "sequence as long as the batch": (
        Encoder(True), label_tokens, {"x": square(), "y": tokens(N, N)}, {"x": 0, "y": 0},
    ),
    "class weights": (
        nn.Linear(D, N), weigh_classes, {"x": torch.randn(N, D), "y": LABELS, "weights": torch.ones(N)},
        {"x": 0, "y": 0, "weights": None},
    ),
    "class weights first": (
        nn.Linear(D, N), weigh_classes, {"weights": torch.ones(N), "x": torch.randn(N, D), "y": LABELS},
        {"weights": None, "x": 0, "y": 0},
    ),
    "table of as many rows": (
        nn.Linear(D, D), look_up, {"table": torch.randn(N, D), "ids": LABELS, "y": torch.randn(N, D)},
        {"table": None, "ids": 0, "y": 0},
    ),
    "contrastive": (nn.Linear(D, D), contrast, {"a": torch.randn(N, D), "b": torch.randn(N, D)}, {"a": 0, "b": 0}),
    "mixed samples": (nn.Linear(D, D), mix_up, {"x": torch.randn(N, D), "y": LABELS}, {"x": 0, "y": 0}),
    "branch on a value": (nn.Linear(D, D), stop_at_nan, {"x": torch.randn(N, D), "y": LABELS}, {"x": 0, "y": 0}),
    "values in a text": (nn.Linear(D, D), show, {"x": torch.randn(S, D), "y": tokens(S)}, {"x": 0, "y": 0}),
    "checks of values": (nn.Linear(D, D), check_targets, {"x": torch.randn(S, D), "y": tokens(S)}, {"x": 0, "y": 0}),
    "checks of sizes": (nn.Linear(D, D), check_sizes, {"x": torch.randn(S, D), "y": tokens(S)}, {"x": 0, "y": 0}),
    "plain tensors only": (nn.Linear(D, D), take_plain, {"x": torch.randn(S, D), "y": tokens(S)}, {"x": 0, "y": 0}),
    "plain tensors only, one of them": (
        nn.Linear(D, D), lambda model, batch: take_plain(model, batch | {"y": tokens(len(batch["x"]))}),
        {"x": torch.randn(S, D)}, {"x": 0},
    ),
    "selection of unknown size": (
        nn.Linear(D, D), select, {"x": square(), "y": tokens(N, N), "m": torch.ones(N, N, dtype=torch.bool)},
        {"x": 0, "y": 0, "m": 0},
    ),
    "images as high as the batch is large": (
        nn.Conv2d(N, 4, 3, padding=1), classify, {"x": torch.randn(N, N, N, N), "y": tokens(N, N, N)}, {"x": 0, "y": 0},
    ),
    "batch statistics": (
        nn.Sequential(nn.Conv1d(N, N, 3, padding=1), nn.BatchNorm1d(N)),
        lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]),
        {"x": torch.randn(N, N, N), "y": torch.randn(N, N, N)}, {"x": 0, "y": 0},
    ),
    "two terms": (
        nn.Linear(D, D), penalize_separately, {"real": torch.randn(N, D), "noise": torch.randn(N, D)},
        {"real": 0, "noise": 0},
    ),
    "not read": (
        nn.Linear(D, D), classify, {"x": torch.randn(N, D), "y": LABELS, "id": LABELS, "names": "abc", "none": None},
        {"x": 0, "y": 0, "id": 0, "names": None, "none": None},
    ),
    "nodes of a shared graph": (
        nn.Linear(D, D), lambda model, batch: F.mse_loss(batch["graph"] @ model(batch["x"]), batch["y"]),
        {"graph": torch.randn(N, N), "x": square(), "y": square()}, {"graph": None, "x": 0, "y": 0},
    ),
    "sums over the samples of each class": (
        nn.Linear(D, D), class_centers, {"x": torch.randn(N, D), "y": LABELS}, {"x": 0, "y": 0},
    ),
    "texts among which labels select": (
        nn.Linear(D, D),
        lambda model, batch: F.cross_entropy(model(batch["images"]) @ model(batch["texts"]).T, batch["y"]),
        {"texts": torch.randn(N, D), "images": torch.randn(N, D), "y": LABELS}, {"texts": None, "images": 0, "y": 0},
    ),
    "a loop over shared values": (
        nn.Linear(D, D), lambda model, batch: sum(F.mse_loss(model(batch["x"] * s), batch["x"]) for s in batch["s"]),
        {"s": torch.randn(N), "x": torch.randn(N, D)}, {"s": None, "x": 0},
    ),
    "normalized over the batch": (
        nn.Linear(D, D), lambda model, batch: (model(batch["x"]).mean(1) * (batch["a"] - batch["a"].mean())).mean(),
        {"x": torch.randn(N, D), "a": torch.randn(N)}, {"x": 0, "a": 0},
    ),
    "broadcast": (
        nn.Linear(D, D), lambda model, batch: (model(batch["x"]) * batch["w"]).mean(),
        {"x": torch.randn(N, D), "w": torch.ones(1, D)}, {"x": 0, "w": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_samples_are_found_by_tracing(case: str) -> None:
    model, step, batch, wanted = FOUND[case]
    found = find_batch_dims(model, step, batch)
    assert found.by_name == {f"batch['{key}']": dim for key, dim in wanted.items()}
    assert not found.lists


Fields = namedtuple("Fields", "x xs")

LISTS = {
    "dicts": (
        nn.Linear(D, D), pad, [{"x": torch.randn(S, D), "y": torch.tensor(1)} for _ in range(N)], {"batch"},
    ),
    "ragged": (
        nn.Linear(D, D), pad, [{"x": torch.randn(2 + i, D), "y": torch.tensor(1)} for i in range(N)], {"batch"},
    ),
    "pairs": (nn.Linear(D, D), collate, [(torch.randn(D), 1) for _ in range(N)], {"batch"}),
    "nested": (
        nn.Linear(D, D), lambda model, batch: collate(model, batch["samples"]),
        {"samples": [(torch.randn(D), 1) for _ in range(N)]}, {"batch['samples']"},
    ),
    "what a loader gives": (
        nn.Linear(D, D), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        [torch.randn(N, D), LABELS], set(),
    ),
    "two tensors alike": (
        nn.Linear(D, D), lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        [torch.randn(N, D), torch.randn(N, D)], set(),
    ),
    "a field whose name begins another one's": (
        nn.Linear(D, D), lambda model, batch: F.mse_loss(model(torch.stack(batch.xs)), batch.x),
        Fields(torch.randn(N, D), [torch.randn(D) for _ in range(N)]), {"batch.xs"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LISTS)
def test_lists_of_samples_are_found(case: str) -> None:
    model, step, batch, wanted = LISTS[case]
    found = find_batch_dims(model, step, batch)
    assert found.lists == wanted
    assert all(dim == 0 for dim in found.by_name.values())


def test_a_tensor_in_the_place_of_a_list_is_cut_by_rows() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(torch.stack(list(batch["xs"]))).mean()

    known = find_batch_dims(nn.Linear(D, D), step, {"xs": [torch.randn(D) for _ in range(N)]})
    found = find_batch_dims(nn.Linear(D, D), step, {"xs": torch.randn(N, D)}, given=known)
    assert found.by_name == {"batch['xs']": 0}


class Bags(nn.Module):
    """Sums of embeddings, each of the tokens between two offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(10, D)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(words, offsets)


def take_known_shapes(model: nn.Module, batch: Any) -> torch.Tensor:
    if any(part.shape != (2 + i, 30 + i) for i, part in enumerate(batch.values())):
        raise ValueError("other shapes")
    return model.weight.sum() * sum(part.sum() for part in batch.values())


def convolve_graph(model: nn.Module, batch: Any) -> torch.Tensor:
    sums = torch.zeros_like(batch["x"]).index_add(0, batch["edges"][1], model(batch["x"])[batch["edges"][0]])
    return F.mse_loss(sums, batch["y"])


def pool_graphs(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(torch.zeros_like(batch["y"]).index_add(0, batch["of"], model(batch["x"])), batch["y"])


def pass_messages(model: nn.Module, batch: Any) -> torch.Tensor:
    source, target = batch["edges"].unbind(1)
    nodes = torch.zeros_like(model.weight).index_add(0, target, model.weight[source] * 0.5)
    return F.mse_loss((nodes[source] * nodes[target]).sum(-1), batch["y"])


def assert_rows(model: nn.Module, batch: Any) -> torch.Tensor:
    assert len(batch["x"]) == N, "all of them"
    return F.cross_entropy(model(batch["x"]), batch["y"])


REFUSED = {
    "offsets": (
        Bags(), lambda model, batch: F.cross_entropy(model(batch["t"], batch["o"]), batch["y"]),
        {"t": tokens(20), "o": torch.arange(N), "y": LABELS}, "embedding_bag reads rows of the batch",
    ),
    "graph": (
        nn.Linear(D, D), convolve_graph,
        {"x": torch.randn(N, D), "edges": tokens(2, 20), "y": torch.randn(N, D)}, "index reads rows of the batch",
    ),
    "nodes summed into graphs that have a label each": (
        nn.Linear(D, D), pool_graphs, {"x": torch.randn(N, D), "of": torch.arange(N) // 2, "y": torch.randn(4, D)},
        "index_add reads rows of the batch",
    ),
    "edges between nodes of a table": (
        nn.Embedding(N, D), pass_messages, {"edges": tokens(20, 2), "y": torch.randn(20)}, "index_add reads rows",
    ),
    "more dimensions than are traced": (
        nn.Linear(D, D), take_known_shapes, {f"x{i}": torch.randn(2 + i, 30 + i) for i in range(MAX_TRACES)},
        "other shapes",
    ),
    "no rows": (nn.Linear(D, D), lambda model, batch: model(batch["x"]).mean(), {"x": torch.tensor(1.0)}, "no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unclear_batch_dims_are_refused_with_the_reason(case: str) -> None:
    model, step, batch, reason = REFUSED[case]
    with pytest.raises(RequestError, match=reason) as refused:
        find_batch_dims(model, step, batch, microbatches=3)
    assert "\n" not in str(refused.value)
    assert case == "no rows" or "batch_dims=" in str(refused.value)


def test_a_step_that_asserts_its_number_of_samples_is_refused_without_advice_for_dimensions() -> None:
    said = (
        r"test_find_batch_dims.py:\d+ in assert_rows: all of them \(with 3 of 8 samples of dimension 0 of .*, as in a "
        r"microbatch\): change that line so that it accepts them, or the batch or the number of microbatches$"
    )
    with pytest.raises(RequestError, match=said):
        find_batch_dims(nn.Linear(D, D), assert_rows, {"x": torch.randn(N, D), "y": LABELS}, microbatches=3)


SHARED = {
    "prototypes": (
        lambda model, batch: F.mse_loss(model(batch["x"]) - model(batch["s"]).mean(0), batch["y"]),
        {"s": torch.randn(N, D), "x": torch.randn(N, D), "y": torch.randn(N, D)}, "sub relates all rows",
    ),
    "negatives": (
        lambda model, batch: F.cross_entropy(model(batch["x"]) @ batch["s"].T, torch.zeros(len(batch["x"])).long()),
        {"s": torch.randn(N, D), "x": torch.randn(N, D)}, "mm relates all rows",
    ),
    "centers": (
        lambda model, batch: torch.cdist(model(batch["x"]), batch["s"]).mean(),
        {"x": torch.randn(N, D), "s": torch.randn(N, D)}, "_euclidean_dist relates all rows",
    ),
    "height and width": (
        lambda model, batch: (model(batch["x"]) / batch["s"].prod()).mean(),
        {"s": torch.tensor([3.0, 4.0]), "x": torch.randn(2, D)}, "div relates all rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARED)
def test_tensor_that_may_be_shared_or_cut_is_refused_with_both_answers(case: str) -> None:
    step, batch, reason = SHARED[case]
    with pytest.raises(RequestError, match=reason) as refused:
        find_batch_dims(nn.Linear(D, D), step, batch)
    text = str(refused.value)
    for shared in (0, None):
        given = {key: shared if key == "s" else 0 for key in batch}
        assert f"batch_dims={given}" in text
        assert find_batch_dims(nn.Linear(D, D), step, batch, given=given).by_name["batch['s']"] == shared
    find_batch_dims(nn.Linear(D, D), step, batch, microbatches=1)  # nothing is cut


SEVERAL_ROWS = {
    "both views of each image": (
        lambda model, batch: F.mse_loss(model(batch["x"]).view(-1, 2, D).mean(1), batch["y"]),
        {"x": torch.randn(2 * N, D), "y": torch.randn(N, D)}, "x", (N, 2, D),
    ),
    "captions of images": (
        lambda model, batch: F.mse_loss(model(batch["y"]).repeat_interleave(4, 0), model(batch["x"])),
        {"x": torch.randn(4 * N, D), "y": torch.randn(N, D)}, "x", (N, 4, D),
    ),
    "flattened targets": (
        lambda model, batch: F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"]),
        {"x": torch.randn(N, 3, D), "y": tokens(3 * N)}, "y", (N, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SEVERAL_ROWS)
def test_several_rows_for_each_sample_are_refused_with_the_shape_to_give(case: str) -> None:
    step, batch, name, shape = SEVERAL_ROWS[case]

    def flattening(model: nn.Module, given: Any) -> torch.Tensor:
        return step(model, {**given, name: given[name].flatten(0, 1)})

    with pytest.raises(RequestError, match="rows for each of the 8 samples") as refused:
        find_batch_dims(nn.Linear(D, D), step, batch)
    assert f"of shape {shape}" in str(refused.value)
    assert "give batch_dims" not in str(refused.value)
    found = find_batch_dims(nn.Linear(D, D), flattening, {**batch, name: batch[name].unflatten(0, shape[:2])})
    assert set(found.by_name.values()) == {0}


class Packed(nn.Module):
    """Attention within the samples of a packed batch, which end where ``ends`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        sample = torch.bucketize(torch.arange(len(x)), ends, right=True)
        q = self.linear(x)[None, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=sample[:, None] == sample)[0, 0]


def test_packed_samples_and_single_sequences_are_refused() -> None:
    packed = {"x": torch.randn(12, D), "ends": torch.tensor([4, 7, 12]), "y": torch.randn(12, D)}

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch["x"], batch["ends"]), batch["y"])

    with pytest.raises(RequestError, match=r"attention.* treats dimension 0 of batch.* as a sequence.*batch_dims="):
        find_batch_dims(Packed(), step, packed)


def test_unclear_batch_dims_are_accepted_for_one_microbatch() -> None:
    model, step, batch, _ = REFUSED["graph"]
    assert find_batch_dims(model, step, batch, microbatches=1).by_name["batch['x']"] == 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


Pair = namedtuple("Pair", "x y")


class Own(dict):
    """A dict of the user's, with an attribute."""

    note = "kept"


@pytest.mark.parametrize(
    "batch",
    [
        Frozen(1.0, {"z": 2}), Pair(1.0, [2]), UserDict(x=1.0, y=(2, 3)), Own(x=1.0, y=Frozen(2, UserDict(a=1))),
        [Frozen(1, 2), Frozen(3, 4)], {"a": Frozen(Frozen(1), [UserDict(b=2)])}, {}, None,
    ],
)  # fmt: skip
def test_flattened_batch_is_restored_with_its_containers(batch: Any) -> None:
    leaves, nesting = flatten_batch(batch)
    again = nesting.batch(leaves)
    assert type(again) is type(batch)
    assert again == batch
    assert flatten_batch(again)[1] == nesting
    assert hash(flatten_batch(again)[1]) == hash(nesting)


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


def test_step_that_accepts_few_batch_sizes_needs_batch_dims_for_a_possibly_shared_tensor():
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        refuse_other_sizes(rows := batch["x"].shape[0])
        return F.mse_loss(model(batch["x"]) + batch["table"][:rows], batch["y"])

    batch = {name: torch.randn(N, D) for name in ("x", "table", "y")}
    with pytest.raises(RequestError, match="batch_dims="):
        find_batch_dims(nn.Linear(D, D), step, batch)
    given = {"x": 0, "table": None, "y": 0}
    assert find_batch_dims(nn.Linear(D, D), step, batch, given=given).by_name["batch['table']"] is None


def scatter_images(model: nn.Module, batch: Any) -> torch.Tensor:
    """Features of images, visited one by one, in place of some tokens, as in models of images and text."""
    features = torch.cat([model(image) for image in batch["images"]])
    tokens = batch["tokens"].masked_scatter(batch["tokens"] > 0, features)
    return F.mse_loss(model(tokens), batch["y"])


def test_images_that_are_scattered_into_the_samples_are_cut_with_them():
    batch = {"images": torch.randn(N, S, D), "tokens": torch.randn(N, 12, D), "y": torch.randn(N, 12, D)}
    found = find_batch_dims(nn.Linear(D, D), scatter_images, batch)
    assert dict(found.leaves) == {"batch['images']": 0, "batch['tokens']": 0, "batch['y']": 0}
