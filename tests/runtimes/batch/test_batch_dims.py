"""Batches of many kinds, cut where their samples are, on threads: equal to one process that sees the whole batch."""

import copy
import dataclasses
import re
from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError, WorkerError
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.session import Session
from panpipe.runtimes.trainer import Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from ...support.cuts import even_plan

N, S, D = 6, 5, 6
F64 = torch.float64
MICROBATCHES = 3


def rows(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def labels(*shape: int) -> torch.Tensor:
    return torch.randint(0, D, shape, generator=torch.Generator().manual_seed(2))


class Mixer(nn.Module):
    """Attention over a sequence between linear layers."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=batch_first)
        self.last = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0])


class Recurrent(nn.Module):
    """The last state of a sequence-first GRU, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.last = nn.GRU(D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gru(x)[0][-1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def label_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"], batch.get("mask")).flatten(0, 1), batch["y"].flatten())


def weigh_classes(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], weight=batch["w"], reduction="none")
    return losses.mean()


def of_fields(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


def of_pair(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def collate(model: nn.Module, batch: Any) -> torch.Tensor:
    return of_pair(model, default_collate(batch))


def one_by_one(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = [F.cross_entropy(model(i).mean(0), t["y"]) for i, t in zip(batch["images"], batch["targets"], strict=True)]
    return torch.stack(losses).mean()


@dataclasses.dataclass(frozen=True)
class Fields:
    x: torch.Tensor
    y: torch.Tensor


Pair = namedtuple("Pair", "x y")

pytestmark = pytest.mark.filterwarnings("ignore:microbatches of a new shape", "ignore:batches keep changing shape")

CASES: dict[str, tuple[Any, Any, Any]] = {
    "mask first": (Mixer(True), label_tokens, {"mask": rows(N, N), "x": rows(N, N, D), "y": labels(N, N)}),
    "mask, sequence first": (Mixer(False), label_tokens, {"x": rows(N, N, D), "mask": rows(N, N), "y": labels(N, N)}),
    "sequence first": (Mixer(False), label_tokens, {"x": rows(S, N, D), "y": labels(S, N)}),
    "sequence first, square": (Mixer(False), label_tokens, {"x": rows(N, N, D), "y": labels(N, N)}),
    "sequence second, square": (Mixer(True), label_tokens, {"x": rows(N, N, D), "y": labels(N, N)}),
    "recurrent": (Recurrent(), classify, {"x": rows(S, N, D), "y": labels(N)}),
    "recurrent, square": (Recurrent(), classify, {"x": rows(N, N, D), "y": labels(N)}),
    "class weights": (mlp(), weigh_classes, {"w": rows(D).abs(), "x": rows(N, D), "y": labels(N)}),
    "table": (
        mlp(), lambda model, batch: F.cross_entropy(model(batch["table"][batch["i"]]), batch["y"]),
        {"table": rows(N, D), "i": labels(N), "y": labels(N)},
    ),
    "transposed": (Mixer(False), label_tokens, {"x": rows(N, S, D).transpose(0, 1), "y": labels(N, S).T}),
    "dictionary": (mlp(), classify, {"x": rows(N, D), "y": labels(N)}),
    "dataclass": (mlp(), of_fields, Fields(rows(N, D), labels(N))),
    "named tuple": (mlp(), of_fields, Pair(rows(N, D), labels(N))),
    "mapping": (mlp(), classify, UserDict(x=rows(N, D), y=labels(N))),
    "list of tensors": (mlp(), of_pair, [rows(N, D), labels(N)]),
    "list of samples": (mlp(), collate, [(rows(D, seed=i), int(labels(N)[i])) for i in range(N)]),
    "list of tensor pairs": (mlp(), collate, [(rows(D, seed=i), labels(N)[i]) for i in range(N)]),
    "ragged lists": (
        mlp(), one_by_one,
        {"images": [rows(2 + i % 2, D, seed=i) for i in range(N)], "targets": [{"y": labels(N)[i]} for i in range(N)]},
    ),
}  # fmt: skip

MASKED = {"x": 0, "y": 0, "mask": None}
DIMS: dict[str, Any] = {
    "mask first": MASKED, "mask, sequence first": {"x": 1, "y": 1, "mask": None}, "sequence first": 1,
    "sequence first, square": 1, "recurrent": {"x": 1, "y": 0}, "recurrent, square": {"x": 1, "y": 0},
    "class weights": {"w": None, "x": 0, "y": 0}, "table": {"table": None, "i": 0, "y": 0}, "transposed": 1,
}  # fmt: skip
"""Where the samples are not in dimension 0 of every tensor."""


def made(model: nn.Module, step: Any, batch: Any, batch_dims: Any = "auto") -> Pipeline:
    example = Example.capture(model, step, batch, MICROBATCHES, batch_dims, "cpu")
    return Pipeline(Session(Trainer(example, even_plan(example.operators, 2, MICROBATCHES), ThreadTeam(2))))


def check_equal(pipe: Pipeline, model: nn.Module, step: Any, batch: Any) -> None:
    """A step of the pipeline has the loss and the gradients of one process for the whole batch."""
    pipe._session.model.zero_grad()
    model.zero_grad()
    loss = pipe.step(batch)
    wanted = step(model, batch)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=1e-12)
    own = dict(pipe._session.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-9, atol=1e-12)


ALIKE = (
    "recurrent", "sequence second, square", "mask, sequence first", "sequence first, square", "transposed",
    "list of tensors", "mapping", "list of tensor pairs", "named tuple",
)  # fmt: skip
"""Cases of which another one has all the mechanisms."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in ALIKE)) for case in CASES])
def test_cut_batch_trains_as_the_whole_batch(case: str) -> None:
    model, step, batch = CASES[case]
    model = copy.deepcopy(model).to(F64)
    dims = DIMS.get(case, "auto")
    pipe = made(copy.deepcopy(model), step, batch, dims)
    check_equal(pipe, model, step, batch)
    torch.testing.assert_close(pipe.evaluate(batch), step(model, batch).detach(), rtol=1e-9, atol=1e-12)
    again = copy.deepcopy(model)
    loss = panpipe.reference_step(again, step, batch, microbatches=MICROBATCHES, batch_dims=dims)
    torch.testing.assert_close(loss, step(model, batch).detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("mask first", 9), ("sequence first", 1), ("class weights", 9),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("mask first", 1), ("sequence first", 9))),
    ],
)  # fmt: skip
def test_smaller_batches_are_cut_where_the_example_was(case: str, count: int) -> None:
    model, step, batch = CASES[case]
    model = copy.deepcopy(model).to(F64)
    pipe = made(copy.deepcopy(model), step, batch, DIMS[case])
    if case == "mask first":
        other = {**batch, "x": rows(count, N, D), "y": labels(count, N)}
    elif case == "sequence first":
        other = {"x": rows(S, count, D), "y": labels(S, count)}
    else:
        other = {**batch, "x": rows(count, D), "y": labels(count)}
    check_equal(pipe, model, step, other)


def test_given_dimensions_are_used() -> None:
    model, batch = mlp().to(F64), {"x": rows(N, N, D), "y": labels(N, N), "unit": rows(N, N)}

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    pipe = made(copy.deepcopy(model), step, batch, {"x": 1, "y": -1, "unit": None})
    check_equal(pipe, model, step, batch)
    check_equal(pipe, model, step, {"x": rows(2, N, D), "y": labels(2, N), "unit": rows(3)})


def test_results_are_joined_along_the_dimension_of_their_rows() -> None:
    model, step, batch = CASES["sequence first, square"]
    model = copy.deepcopy(model).to(F64)
    pipe = made(copy.deepcopy(model), step, batch, 1)

    def logits(model: nn.Module, batch: Any) -> Any:
        out = model(batch["x"])
        return {"all": out, "last": out[-1]}

    found, wanted = pipe.forward(batch, logits), logits(model, batch)
    torch.testing.assert_close(found["all"], wanted["all"].detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found["last"], wanted["last"].detach(), rtol=1e-9, atol=1e-12)
    with pytest.raises(RequestError, match="needs a row for each sample along one dimension"):
        pipe.forward(batch, lambda model, batch: model(batch["x"]).sum((0, 1)))


@pytest.fixture(scope="module")
def trained() -> Pipeline:
    return made(mlp().to(F64), classify, {"x": rows(N, D), "y": labels(N)})


BAD: dict[str, tuple[Any, str]] = {
    "other width": (
        {"x": rows(N, 4), "y": labels(N)},
        r"batch\['x'\] is 2×4 float64 in a microbatch, and 2×6 float64 in the example's",
    ),
    "other rank": (
        {"x": rows(N, 1, D), "y": labels(N)},
        r"batch\['x'\] is 2×1×6 float64 in a microbatch, and 2×6 float64",
    ),
    "other dtype": ({"x": rows(N, D).float(), "y": labels(N)}, r"batch\['x'\] is 6×6 float32, and 2×6 float64"),
    "labels of another kind": ({"x": rows(N, D), "y": rows(N)}, r"batch\['y'\] is 6 float64, and 2 int64"),
    "missing key": ({"x": rows(N, D)}, r"batch\['y'\] is missing: the example has batch\['x'\], batch\['y'\]"),
    "other rows": ({"x": rows(N, D), "y": labels(4)}, r"batch\['x'\] has shape 6×6.*batch\['y'\] has shape 4"),
    "none": ({"x": rows(N, D), "y": None}, r"batch\['y'\] is None, and 2 int64 in the example"),
    "text": ({"x": rows(N, D), "y": "cat"}, r"batch\['y'\] is 'cat', and 2 int64 in the example"),
    "array": ({"x": rows(N, D).numpy(), "y": labels(N)}, r"batch\['x'\] is a numpy ndarray"),
    "a tensor": (rows(N, D), r"batch\['x'\] is missing: the example has batch\['x'\], batch\['y'\]"),
    "scalar": ({"x": rows(N, D), "y": torch.tensor(1)}, r"batch\['y'\] is scalar, and dimension 0"),
    "empty": ({"x": rows(0, D), "y": labels(0)}, "0 samples"),
    "no batch": (None, "this batch is None: |batch is a NoneType, and dimension 0 of it holds"),
    "meta": ({"x": rows(N, D).to("meta"), "y": labels(N)}, r"batch\['x'\] is on the meta device \(6×6 float64\)"),
    "sparse": ({"x": rows(N, D).to_sparse(), "y": labels(N)}, r"batch\['x'\] is sparse \(torch.sparse_coo\)"),
    "nested": (
        {"x": torch.nested.nested_tensor(list(rows(N, D)), layout=torch.jagged), "y": labels(N)},
        r"batch\['x'\] is a nested tensor: ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_batch_is_one_line_with_the_key(
    case: str, trained: Pipeline, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    batch, reason = BAD[case]
    with pytest.raises(RequestError, match=reason) as refused:
        trained.step(batch)
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""
    assert not caplog.records
    assert trained.step({"x": rows(N, D), "y": labels(N)}).isfinite()


LABELS_OF_ANOTHER_SIZE = {"x": rows(N, D), "y": labels(N).int()}
"""Operators that look values up take them, so tracing does, and the loss fails on them."""


def test_failing_operator_is_named_with_its_line_and_the_difference_of_the_batch(trained: Pipeline) -> None:
    line = classify.__code__.co_firstlineno + 1
    with pytest.raises(WorkerError) as failure:
        trained.step(LABELS_OF_ANOTHER_SIZE)
    assert re.search(rf"target dtype .* \(at [^ ]*{Path(__file__).name}:{line}\)", str(failure.value))
    assert str(failure.value).endswith("; batch['y'] is 2 int32 in a microbatch, and 2 int64 in the example's")
    with pytest.raises(WorkerError, match=rf"IndexError: Target 77 .* \(at [^ ]*:{line}\)$"):
        trained.step({"x": rows(N, D), "y": labels(N) + 77})
    assert trained.step({"x": rows(N, D), "y": labels(N)}).isfinite()
