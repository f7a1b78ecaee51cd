"""Rates of a step."""

import pytest
from panpipe.core.trace.throughput import StepTotals, Throughput, throughput


def test_rates_of_what_is_known():
    assert throughput(0.5, StepTotals()) == Throughput()
    assert throughput(0.5, StepTotals(samples=8, tokens=4096)) == Throughput(16.0, 8192.0, None)
    assert throughput(0.5, StepTotals(samples=8), replicas=2).samples_per_s == 32.0
    assert throughput(0.0, StepTotals(samples=8)) == Throughput()


def test_model_flops_utilisation_is_over_all_devices():
    found = throughput(2.0, StepTotals(flops=3e14), peak_flop_per_s=[1e14, 2e14])
    assert found.model_flops_utilisation == pytest.approx(0.5)
    assert throughput(2.0, StepTotals(flops=3e14)).model_flops_utilisation is None
