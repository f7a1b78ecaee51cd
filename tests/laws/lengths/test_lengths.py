"""A step of any size equals a step captured for that size, to the last bit; all sizes take at most two captures."""

import copy
import functools
import json
from pathlib import Path

import panpipe
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ...support.launch import forked_script
from .kinds import KINDS
from .models import CASES as MODELS
from .models import Case
from .ranks import LAWS
from .walks import MICROBATCHES, STEP, Captures, built, check_peaks, check_walk, random_walk

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*relates samples", "ignore:microbatches of a new shape", "ignore:batches keep changing shape",
    "ignore:.*is captured again for each new value"
)  # fmt: skip

CASES = {**MODELS, **KINDS}


@pytest.fixture
def captures():
    """Counts captures."""
    found = Captures()
    with found.counted():
        yield found


def slow_but(names, quick):
    """Parameters of a test: those that are not quick are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.filterwarnings("ignore:.*the loss does not depend on it")  # poolers of some models
@pytest.mark.parametrize("name", slow_but(CASES, ("unet",)))
def test_sizes_equal_captures_for_each_size(name, tmp_path):
    check_walk(CASES[name], [(STEP, size) for size in CASES[name].sizes], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lstm", {"schedule": "zb-h1"}), ("gpt with dropout", {"schedule": "zb-h1", "recompute": "all"}),
        ("bert with dropout", {"offload": "all"}), ("t5", {"schedule": "zb-v", "recompute": "auto"}),
    ],
)  # fmt: skip
def test_walks_equal_captures_for_each_size(name, options, tmp_path):
    check_walk(CASES[name], random_walk(CASES[name], seed=0), tmp_path, **options)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """Check laws on two ranks, all in one start, and return name → problems on each rank."""

    @functools.cache
    def results(names: tuple[str, ...]):
        folder = tmp_path_factory.mktemp("ranks")
        forked_script(Path(__file__).with_name("ranks.py"), str(folder), *names, PANPIPE_TIMEOUT_S="60")
        found = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
        return {name: [one[name] for one in found] for name in names}

    return results


FAST = ("accumulation, evaluation and checkpoints",)
OTHERS = tuple(name for name in LAWS if name not in FAST)


@pytest.mark.parametrize("name", FAST)
def test_two_ranks(name, on_ranks):
    assert on_ranks(FAST)[name] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_two_ranks_by_other_laws(name, on_ranks):
    assert on_ranks(OTHERS)[name] == ["", ""]


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
@settings(max_examples=2, deadline=None)
def test_any_sequence_of_sizes_equals_one_process(shapes):
    check_equal_to_one_process(shapes)


def test_programs_of_eight_sizes_are_compiled_and_one_more_capture_serves_all_others(captures):
    compiled = []

    def backend(graph, examples):
        compiled.append(graph)
        return graph.forward

    with pytest.warns(UserWarning, match="8 shapes of microbatches are compiled, and those of further shapes run with"):
        check_equal_to_one_process([(4, length) for length in range(2, 13)], compile=backend)
    assert captures.count == 9
    assert compiled


def test_declared_sizes_take_one_capture_and_their_largest_ones_are_planned(captures):
    case = CASES["unet"]
    check_peaks(case, {"x": {2: 32, 3: 34}, "y": {1: 32, 2: 34}})
    assert captures.count == 1
    pipe, largest = built(case, 8, dynamic={"x": {2: 16, 3: 18}, "y": {1: 16, 2: 18}}), built(case, 16)
    assert pipe.plan.graph_hash == largest.plan.graph_hash  # with the bytes of all tensors
    largest.load_state_dict(pipe.state_dict())
    assert torch.equal(pipe.step(case.batch(10)), largest.step(case.batch(10)))


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


class Looped(nn.Module):
    """A recurrence that is written as a loop over the sequence, which fixes its length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64)

    def forward(self, x):
        state, found = 0.0, []
        for each in self.embed(x).unbind(1):
            state = torch.tanh(self.inner(each) + state)
            found.append(state)
        return self.head(torch.stack(found, 1))


@pytest.mark.filterwarnings("error")
def test_step_that_fixes_its_sizes_is_captured_for_each_and_says_so_once(captures):
    case = Case(Looped, CASES["lstm"].step, CASES["lstm"].batch)
    pipe = built(case, 5)
    pipe.step(case.batch(5))
    with pytest.warns(UserWarning, match="they cannot be symbols: the step fixes them, as a loop"):
        pipe.step(case.batch(6))
    for size in (7, 5, 6):
        pipe.step(case.batch(size))
    assert captures.count == 5  # three sizes, and two attempts


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
