"""The benchmark of kills compares last parameters; a rank may have a stage without any."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "failures" / "kills.py"


@pytest.fixture(scope="module")
def fault_of_end():
    spec = importlib.util.spec_from_file_location("benchmark_of_kills", FILE)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.fault_of_end
    del sys.modules[spec.name]


@pytest.mark.parametrize("end", [{}, {"0.weight": "a", "0.bias": "b"}])
def test_equal_last_parameters_are_no_fault(end, fault_of_end):
    assert fault_of_end(dict(end), dict(end)) == ""


@pytest.mark.parametrize(
    ("end", "whole", "named"),
    [
        ({"0.weight": "a", "0.bias": "c"}, {"0.weight": "a", "0.bias": "b"}, "ended with other values of 0.bias"),
        ({"0.weight": "a"}, {}, "ended with other values of 0.weight"),
        ({}, {"0.weight": "a"}, "ended with other values of 0.weight"),
        (None, {}, "did not record its last parameters"),
    ],
)
def test_other_last_parameters_are_a_fault(end, whole, named, fault_of_end):
    assert fault_of_end(end, whole) == named
