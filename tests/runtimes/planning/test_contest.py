"""The first steps of training compare plans in turns: results have the same bits as under any one of the plans."""

import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import panpipe
import pytest
import torch
from attrs import evolve
from panpipe.core.search.suggestions.preference import preference
from panpipe.runtimes.planning.contest import Contest, Turn
from torch import nn

from ...laws.grouped import grouped
from ...support import models
from ...support.launch import forked_script, found
from .contest_runs import CASES, run

SCRIPT = Path(__file__).with_name("contest_runs.py")


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["evaluated"] == other["evaluated"]
    assert one["bits"] == other["bits"]


@pytest.mark.parametrize(
    "name", [name if "scaler" in name else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_results_have_the_bits_of_every_single_plan(name, tmp_path):
    mixed = run(name, tmp_path, contest=4)
    assert len(mixed["plans"]) > 1, "nothing was compared"
    assert len({tuple(stages) for stages in mixed["stages"]}) > 1, "no stages moved"
    for plan in (mixed["plans"][0], mixed["plans"][-1]):  # every plan has had a part of the mixed steps
        same(run(name, tmp_path, plan=plan), mixed)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*models.CASES.values(), models.PYTHON], ids=[*models.CASES, "code that needs values"])
def test_models_have_the_bits_of_every_single_plan(case):
    batches = [case.batch(8, torch.float32) for _ in range(24)]

    def train(plan: Any) -> tuple[list[str], list[Any]]:
        with panpipe.pipeline(
            case.model(torch.float32), case.step, batches[0], optimizer=torch.optim.AdamW, microbatches=4, plan=plan,
            run=panpipe.Run(progress=False),
        ) as pipe:  # fmt: skip
            losses = [pipe.step(batch).item().hex() for batch in batches]
            bits = [value.numpy().tobytes() for value in pipe.state_dict()["model"].values()]
            plans = [] if pipe.contest is None else [candidate.plan for candidate in pipe.contest.candidates]
            return [*losses, *bits], plans

    mixed, plans = train(panpipe.Auto(contest=4, cache=False))
    assert len(plans) > 1, "nothing was compared"
    for plan in plans:
        assert train(plan)[0] == mixed


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("dropout, clipping, accumulation and a scheduler", 2),
        pytest.param("replicas", 4, marks=pytest.mark.slow),
        pytest.param("replicas that share", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_agree_and_have_the_bits_of_every_single_plan(name, ranks, tmp_path):
    forked_script(SCRIPT, name, str(tmp_path), ranks=ranks)
    by_rank = found(tmp_path, ranks)
    shares = name == "replicas that share"  # its slices of parameters round differently with other cuts
    assert shares or len(by_rank[0]) > 2, "nothing was compared"
    runs = [
        {**each[0], "bits": {k: v for rank in each for k, v in rank["bits"].items()}}
        for each in zip(*by_rank, strict=True)
    ]
    for alone in runs[1:]:
        same(alone, runs[0])
    assert (len({tuple(stages) for stages in runs[0]["stages"]}) > 1) == (not shares)


def small(**options: Any) -> panpipe.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    batch = torch.randn(16, 32)
    options = {"optimizer": torch.optim.SGD, "microbatches": 4, "cache": False, "progress": False, **options}
    if "plan" in options:
        del options["cache"]
    return panpipe.pipeline(model, lambda model, x: model(x).square().mean(), batch, **grouped(**options))


def test_one_line_reports_the_winner_and_the_pipeline_has_the_table(caplog):
    pipe = small(contest=4)
    batch = torch.randn(16, 32)
    while pipe.contest.winner is None:
        pipe.step(batch)
    said = [record.getMessage() for record in caplog.records if record.name == "panpipe"]
    assert said == [str(pipe.contest)]
    assert said[0].startswith(f"plan: {pipe.plan.schedule}, {len(pipe.plan.stages)} stages; fastest step ")
    assert len(repr(pipe.contest).splitlines()) == 1 + len(pipe.contest.candidates)
    pipe.close()


@pytest.mark.filterwarnings("ignore:microbatches of a new shape")
def test_batches_of_many_sizes_are_compared_by_size():
    pipe = small(contest=4)
    for number in range(200):
        if pipe.contest.winner is not None:
            break
        pipe.step(torch.randn(16 + 4 * (number % 3), 32))
    assert re.search(r"; fastest steps? .* against .* of ", str(pipe.contest))
    pipe.close()


def simulated(plans: list[Any], seconds: Callable[[Any, int], float]) -> Contest:
    """The result of a contest whose steps have random sizes, and take the given times or up to 30 % longer."""
    return played(Contest(plans, preference(["1f1b", "zb-h1"])), seconds)


def played(contest: Contest, seconds: Callable[[Any, int], float]) -> Contest:
    draw = random.Random(0)
    blocks = contest.blocks()
    block = next(blocks)
    with suppress(StopIteration):
        while True:
            sizes = [draw.randint(1000, 3000) for _ in block]
            block = blocks.send([
                Turn(seconds(each.plan, size) * draw.uniform(1, 1.3), size)
                for each, size in zip(block, sizes, strict=True)
            ])  # fmt: skip
    return contest


def test_uneven_cut_must_gain_three_percent():
    pipe = small(contest=4)
    even = next(each.plan for each in pipe.contest.candidates if len(each.plan.stages) == 2)
    pipe.close()
    (first, second), memory = even.stages, even.predicted.peak_memory_bytes
    stages = evolve(first, nodes=(*first.nodes, second.nodes[0])), evolve(second, nodes=second.nodes[1:])
    less = evolve(even.predicted, peak_memory_bytes=tuple(size / 2 for size in memory))
    uneven = evolve(even, stages=stages, prediction=less)
    for gain, wins in ((0.98, even), (0.9, uneven)):
        factor = {even.hash: 1.0, uneven.hash: gain}
        contest = Contest([even, uneven], preference(["1f1b", "zb-h1"]))
        blocks = contest.blocks()
        block = next(blocks)
        with suppress(StopIteration):
            while True:
                block = blocks.send([Turn(factor[each.plan.hash]) for each in block])
        assert contest.winner.plan is wins


def test_captures_of_new_sizes_take_a_tenth_of_a_contest_at_most():
    """Each placement of stages needs programs for new sizes: 5 s here, and a step takes 1 s."""
    pipe = small(contest=4)
    plans = [each.plan for each in pipe.contest.candidates]
    pipe.close()
    contest, captured, steps = Contest(plans, preference(["1f1b", "zb-h1"])), set(), []
    blocks = contest.blocks()
    block = next(blocks)
    with suppress(StopIteration):
        while len(captured) < len({each.stages for each in plans}):
            for each in block:
                capture_s = 0.0 if each.plan.stages in captured else 5.0
                captured.add(each.plan.stages)
                steps.append(Turn(1.0 + capture_s, 0 if capture_s else 1, capture_s))
            block = blocks.send(steps[-len(block) :])
    moves = [number for number, turn in enumerate(steps) if turn.capture_s]
    assert sum(turn.seconds - turn.capture_s for turn in steps[: moves[1]]) >= 45


def test_second_run_starts_with_the_winner(tmp_path, monkeypatch):
    monkeypatch.setenv("PANPIPE_CACHE", str(tmp_path))
    first = small(contest=4, cache=True)
    again = small(contest=4, cache=True)
    assert len(again.contest.candidates) == len(first.contest.candidates)  # the contest did not end
    while not first.contest.done:
        first.step(torch.randn(16, 32))
    last = small(contest=4, cache=True)
    assert last.contest is None
    assert last.plan.hash == first.plan.hash
    assert last.plan.prediction.step_s == first.plan.prediction.step_s


def test_memory_peak_is_that_of_the_largest_candidate():
    """Parameters, gradients, optimizer state and saved tensors, of each device."""

    def peaks(reports: list[Any]) -> list[int]:
        return [max(report.devices[device].memory_peak_bytes for report in reports) for device in range(2)]

    mixed: list[Any] = []
    pipe = small(contest=4, optimizer=torch.optim.AdamW, monitor=mixed.append)
    while not pipe.contest.done:
        pipe.step(torch.randn(16, 32))
    pipe.close()
    found = []
    for candidate in pipe.contest.candidates:
        alone: list[Any] = []
        with small(plan=candidate.plan, optimizer=torch.optim.AdamW, monitor=alone.append) as one:
            for _ in range(2):
                one.step(torch.randn(16, 32))
        found.append(peaks(alone))
    for device, peak in enumerate(peaks(mixed)):
        assert peak == pytest.approx(max(each[device] for each in found), rel=0.03)


@pytest.mark.parametrize("gain", [0.9, 1.1])
def test_winner_is_compared_with_further_plans(gain):
    pipe = small(contest=4)
    first, second = [candidate.plan for candidate in pipe.contest.candidates][:2]
    pipe.close()
    factor = {first.hash: 1.0, second.hash: gain}

    def seconds(plan: Any, size: int) -> float:
        return factor[plan.hash] * (size + 200)

    contest = simulated([first], seconds)
    assert contest.winner.plan is first
    assert not contest.extend([first])
    assert contest.extend([first, second])
    assert contest.winner is None
    assert played(contest, seconds).winner.plan is (second if gain < 1 else first)
    assert [candidate.plan for candidate in contest.candidates] == [first, second]
