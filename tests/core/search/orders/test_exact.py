"""The exact program compared with all possible orders, and its use in the search."""

import itertools
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.actions import Action, parse_action
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.evaluate.reference import evaluate
from panpipe.core.schedules.construction.instance import instance
from panpipe.core.schedules.placement import looped_placement
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families
from panpipe.core.search.orders.auto import find_schedule
from panpipe.core.search.orders.exact import solvable, solve


@cache
def rows(microbatches: int) -> tuple[str, ...]:
    """Every order of one stage's F, I and W in which no microbatch overtakes another."""
    words = []
    for word in set(itertools.permutations("FIW" * microbatches)):
        counts = {"F": 0, "I": 0, "W": 0}
        for letter in word:
            counts[letter] += 1
            if not counts["F"] >= counts["I"] >= counts["W"]:
                break
        else:
            words.append("".join(word))
    return tuple(words)


def actions(stage: int, word: str) -> tuple[Action, ...]:
    counts = {letter: itertools.count() for letter in "FIW"}
    return tuple(parse_action(f"{stage}{letter}{next(counts[letter])}") for letter in word)


def problem_of(devices, microbatches, costs, hop, memory):
    return ScheduleProblem(devices, microbatches, 1, tuple(costs), hop, memory_limit=memory)


times = st.integers(1, 9).map(float)


@st.composite
def problems(draw):
    count = draw(st.integers(1, 2))
    costs = [
        StageCosts(draw(times), draw(times), draw(times), saved_bytes=2, freed_by_input_bytes=draw(st.integers(0, 1)))
        for _ in range(2)
    ]
    return problem_of(2, count, costs, draw(st.sampled_from([0.0, 2.0])), draw(st.sampled_from([2, 3, 4])))


@settings(max_examples=40)
@given(problems())
def test_solve_finds_the_fastest_of_all_orders(problem):
    best = float("inf")
    for one, other in itertools.product(rows(problem.microbatches), repeat=2):
        try:
            result = evaluate((actions(0, one), actions(1, other)), (0, 1), problem.costs, hop_s=problem.hop_s)
        except RequestError:
            continue  # a deadlock
        if max(result.peak_memory) <= problem.memory_limit:
            best = min(best, result.makespan)
    found = solve(instance(problem, (0, 1)), 1000.0)
    assert found.bound == pytest.approx(best, rel=1e-5)
    result = evaluate(found.device_actions, (0, 1), problem.costs, hop_s=problem.hop_s)
    assert result.makespan == pytest.approx(best)
    assert max(result.peak_memory) <= problem.memory_limit


@pytest.mark.parametrize(("devices", "microbatches", "optimum"), [(3, 4, 186), (4, 4, 234), (2, 12, 378)])
def test_small_cases_are_proved_optimal(devices, microbatches, optimum):
    cost = StageCosts(10, 12, 8, saved_bytes=1)
    problem = problem_of(devices, microbatches, [cost] * devices, 1, 2)
    found = find_schedule([problem], families().values(), evaluations=20_000)
    assert found.result.makespan == found.bound == optimum
    assert found.gap == 0


def test_solvable_excludes_large_problems_and_faster_fused_backwards():
    cost = StageCosts(1, 1, 1, saved_bytes=1)
    assert not solvable(instance(problem_of(8, 32, [cost] * 8, 0, 4), looped_placement(8, 1)))
    fused = StageCosts(1, 1, 1, backward_s=1.5, saved_bytes=1)
    assert not solvable(instance(problem_of(2, 2, [fused] * 2, 0, 4), (0, 1)))
    assert solvable(instance(problem_of(2, 2, [cost] * 2, 0, 4), (0, 1)))
