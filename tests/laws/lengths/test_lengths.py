"""A step of any size equals a step captured for that size, to the last bit; all sizes take at most two captures."""

import copy

import panpipe
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ...laws.grouped import grouped
from .models import CASES, Case

pytestmark = pytest.mark.filterwarnings("ignore:.*relates samples", "ignore:microbatches of a new shape")

MICROBATCHES = 2


@pytest.fixture
def captures(monkeypatch):
    """Counts captures: the calls of torch's export."""
    count, export = [0], torch.export.export

    def counted(*args, **kwargs):
        count[0] += 1
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return count


def built(case: Case, size: int, **options) -> panpipe.Pipeline:
    """A pipeline of two devices whose example has this size."""
    return panpipe.pipeline(
        case.model(), case.step, case.batch(size),
        **grouped(
            optimizer=torch.optim.AdamW, microbatches=MICROBATCHES, progress=False,
            **(options if "plan" in options else {"contest": False, "cache": False, **options}),
        ),
    )  # fmt: skip


def own_capture(case: Case, size: int, plan: panpipe.Plan) -> panpipe.Pipeline:
    """A pipeline with the cut of this plan whose example has this size.

    With another cut, the gradients of a weight that is read in three stages, as T5's embedding is, would be summed in
    another order.
    """
    with built(case, size, mesh="pp=1") as alone:
        graph_hash = alone.plan.graph_hash
    return built(case, size, plan=evolve(plan, graph_hash=graph_hash))


def check_equal_to_own_captures(case: Case, captures: list[int], **options) -> None:
    pipe = built(case, case.sizes[0], **options)
    pipe.step(case.batch(case.sizes[0]))
    counts = []
    for size in case.sizes[1:]:
        state, known = copy.deepcopy(pipe.state_dict()), captures[0]
        loss = pipe.step(case.batch(size))
        counts.append(captures[0] - known)
        fresh = own_capture(case, size, pipe.plan)
        fresh.load_state_dict(state)
        assert torch.equal(fresh.step(case.batch(size)), loss), size
        mine, others = (panpipe.weights.on_parameters(each, lambda name, p: p.clone()) for each in (pipe, fresh))
        for name, parameter in mine.items():
            assert torch.equal(parameter, others[name]), (size, name)
    assert counts == [1, *(0 for _ in case.sizes[2:])]


QUICK = ("lstm", "unet")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_sizes_equal_their_own_captures(name, captures):
    check_equal_to_own_captures(CASES[name], captures)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt with dropout", {"schedule": "zb-h1", "recompute": "all"}),
        ("bert with dropout", {"offload": "all"}),
    ],
)
def test_sizes_equal_their_own_captures_under_policies(name, options, captures):
    check_equal_to_own_captures(CASES[name], captures, **options)


class Small(nn.Module):
    """Embedding, attention by a causal mask of 32 rows, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64)
        self.register_buffer("mask", torch.ones(32, 32).tril().bool())

    def forward(self, x):
        wide, length = self.embed(x), x.shape[1]
        scores = (wide @ wide.transpose(1, 2) / length).masked_fill(~self.mask[:length, :length], -1e9)
        return self.head(torch.tanh(self.inner(scores.softmax(-1) @ wide)))


def small_step(model, batch):
    x = batch["x"]
    loss = F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    return loss * 2 if x.shape[1] > 16 else loss


def small_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length))}


def check_equal_to_one_process(shapes: list[tuple[int, int]], **options) -> None:
    torch.manual_seed(0)
    model = Small().double()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    pipe = panpipe.pipeline(
        model, small_step, small_batch(4, 9), optimizer=lambda named: torch.optim.SGD(named, lr=0.1), microbatches=2,
        plan=panpipe.Auto(contest=False, cache=False), run=panpipe.Run(progress=False, **options),
    )  # fmt: skip
    for rows, length in shapes:
        batch = small_batch(rows, length)
        losses = [small_step(alone, {"x": part}) * (len(part) / rows) for part in batch["x"].tensor_split(2)]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        assert abs(pipe.step(batch) - sum(losses)) < 1e-10, (rows, length)
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-10), name
    pipe.close()


@pytest.mark.filterwarnings("ignore:batches keep changing shape")
@given(st.lists(st.tuples(st.integers(2, 6), st.integers(2, 32)), min_size=2, max_size=8))
@settings(max_examples=3, deadline=None)
def test_any_sequence_of_sizes_equals_one_process(shapes):
    check_equal_to_one_process(shapes)


def test_programs_of_eight_sizes_are_compiled_and_one_more_capture_serves_all_others(captures):
    compiled = []

    def backend(graph, examples):
        compiled.append(graph)
        return graph.forward

    with pytest.warns(UserWarning, match="8 shapes of microbatches are compiled, and those of further shapes run with"):
        check_equal_to_one_process([(4, length) for length in range(2, 16)], compile=backend)
    assert captures == [9]
    assert compiled


def test_declared_sizes_take_one_capture_and_their_largest_ones_are_planned(captures):
    case = CASES["unet"]
    pipe = built(case, 8, dynamic={"x": {2: 16, 3: 18}, "y": {1: 16, 2: 18}})
    largest = built(case, 16)
    assert captures == [2]  # one each
    assert pipe.plan.graph_hash == largest.plan.graph_hash  # with the bytes of all tensors
    planned, measured = panpipe.simulate(pipe.plan).peak_saved_bytes, {}
    for size in (8, 12, 16, 10):
        largest.load_state_dict(pipe.state_dict())
        loss, trace = pipe.trace_step(case.batch(size))
        assert torch.equal(loss, largest.step(case.batch(size)))
        held = [[s.bytes for s in trace.memory if s.device == d and s.kind == "saved"] for d in range(len(planned))]
        measured[size] = [max(each) for each in held]
    assert measured.pop(16) == pytest.approx(planned, rel=0.05)
    assert all(mine < most for each in measured.values() for mine, most in zip(each, planned, strict=True))
    assert captures == [3]  # the second size of the other one
    with pytest.raises(panpipe.RequestError, match=r"batch\['x'\] has 20 entries in dimension 2, .* at most 16"):
        pipe.step(case.batch(20))
    assert pipe.metrics.steps == 4


def test_captures_that_take_long_are_reported_while_they_run(monkeypatch):
    monkeypatch.setattr("panpipe.runtimes.launch.progress.NOTICED_S", 0.0)
    case, phases = CASES["lstm"], []
    pipe = panpipe.pipeline(
        case.model(), case.step, case.batch(9), optimizer=torch.optim.SGD, microbatches=MICROBATCHES, plan="1f1b",
        run=panpipe.Run(progress=lambda phase, done, total: phases.append(phase)),
    )  # fmt: skip
    planned = len(phases)
    pipe.evaluate(case.batch(9))
    pipe.step(case.batch(12))
    assert phases[planned] == "capturing for microbatches of 2×9, 2×9"
    assert set(phases[planned + 1 :]) == {"capturing for microbatches of 2×12, 2×12"}


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ({"z": 1}, r"dynamic has batch\['z'\]"),
        (4, r"dynamic has 4 for batch\['x'\].*3×8×10: give a dimension from -4 to 3"),
        ({"x": {2: 7}}, "dynamic has 7 as the largest size .* which is 8 in the example"),
        ("x", "dynamic has 'x' for"),
    ],
)
def test_declared_sizes_that_do_not_fit_the_batch_are_refused(dynamic, said):
    with pytest.raises(panpipe.RequestError, match=said):
        built(CASES["unet"], 8, dynamic=dynamic)
