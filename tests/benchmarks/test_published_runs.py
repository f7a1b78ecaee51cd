"""Published runs: the prediction's terms, what the configurations imply, and the errors."""

import importlib
import statistics
import sys
from pathlib import Path

import pytest
from attrs import evolve

FOLDER = Path(__file__).parents[2] / "benchmarks" / "published"


@pytest.fixture(scope="module")
def runs():
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("published_runs")
    sys.path[:] = before  # the script has added the root


def outcome(runs, name):
    run = next(run for run in runs.RUNS if run.name == name)
    return runs.Outcome(run, runs.predicted(run))


@pytest.mark.parametrize(
    "name", ["GPT 22B, full recomputation", "GPT 22B, selective", "MPT 7b on 8 H100", "MPT 30b on 8 A100-80GB"]
)
def test_runs_on_one_node_are_predicted_within_10_percent(runs, name):
    found = outcome(runs, name)
    assert abs(found.error()) < 0.1
    assert tuple(found.terms) == runs.TERMS
    assert all(seconds >= 0 for seconds in found.terms.values())


def test_products_of_a_layer_have_the_flops_of_the_formula(runs):
    model, samples, tensor = runs.GPT_22B, 4, 8
    parts = runs.layer(model, runs.Sharding(samples, tensor))[:2]
    done = sum(kernel.flops for part in parts for kernel in part.kernels) * tensor
    counted = model.flops_per_token - 6 * model.hidden * model.vocabulary
    assert done * model.layers == pytest.approx(counted * samples * model.sequence)


def test_share_of_a_run_is_exact_where_it_is_the_catalogues(runs):
    found = outcome(runs, "GPT 22B, selective")
    device = runs.find_device("A100-80GB")
    assert found.error(device.sustained) == pytest.approx(found.error())
    slower = runs.Outcome(found.run, runs.predicted(found.run, evolve(device, sustained=0.7)))
    assert found.error(0.7) == pytest.approx(slower.error(), abs=0.01)  # memory-bound products do not change


def test_layers_are_even_or_count_the_embedding_and_the_head(runs):
    assert runs.layers_of(96, 24) == [4] * 24
    assert runs.layers_of(126, 128) == [0, *[1] * 126, 0]
    assert sum(runs.layers_of(70, 12)) == 70


@pytest.mark.slow
def test_errors_of_all_runs_are_within_the_bars(runs):
    outcomes = [runs.Outcome(run, runs.predicted(run)) for run in runs.RUNS]
    fit = [each for each in outcomes if each.fits]
    errors = [abs(each.error()) for each in fit]
    assert len(errors) >= 8
    assert statistics.median(errors) <= 0.1
    assert max(errors) <= 0.2
    alone = runs.held_out(fit)
    bound = max(abs(error) for error in alone.values())
    for name in ("A100-80GB", "H100"):
        device = runs.find_device(name)
        own = [each for each in fit if each.run.device == name]
        assert runs.fitted(own) == pytest.approx(device.sustained, abs=0.005)
        assert device.step_error == pytest.approx(bound, abs=0.01)


def test_computation_is_slower_while_communication_takes_multiprocessors(runs):
    overlap, a100 = importlib.import_module("overlap"), runs.find_device("A100-80GB")
    taken = overlap.share_taken(a100)
    assert taken == a100.communication_multiprocessors / a100.multiprocessors
    assert overlap.overlapped_s(a100, 10.0, 2.0) == pytest.approx(10.0 + 2.0 * taken)
    assert overlap.overlapped_s(a100, 1.0, 2.0) == 2.0
    assert overlap.overlapped_s(a100, 10.0, 0.0) == 10.0
    assert overlap.share_taken(runs.find_device("cpu-core")) == 0.0
