"""Cuts that fit in the devices' memory."""

import numpy as np
from panpipe.core.evaluate.coding import encode
from panpipe.core.search.annealing.fitting_cuts import fitting_cuts, most_in_flight, readings_of

from ....support.plans import orders
from ....support.settings import setting_of

NONE = np.zeros(2, dtype=np.bool_)


def test_in_flight_counts_the_most_microbatches_that_are_held_at_once():
    coded, lengths = encode(orders("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"), 2, 3)
    assert most_in_flight(coded, lengths, 2, 3).tolist() == [2, 1]
    halves, lengths = encode(orders("0F0 0I0 0F1 0W0 0I1 0W1"), 1, 2)
    assert most_in_flight(halves, lengths, 1, 2).tolist() == [2]  # saved tensors exist until W


def test_readings_list_by_operator_what_the_graph_lists_by_tensor():
    readings = readings_of(setting_of([1.0] * 3).arrays)
    assert readings.first.tolist()[:3] == [0, 0, 1]
    assert readings.tensor.tolist() == [0, 1]


def test_fitting_cuts_are_the_most_even_that_fit():
    placement = np.array([0, 1])
    roomy = setting_of([1.0] * 6, saved=10, memory=1000.0)
    assert fitting_cuts(roomy, placement, np.array([2, 1]), NONE) == ((0, 3, 6), True)
    # Device 0 holds two microbatches: of two operators 40 bytes, of three 60.
    tight = setting_of([1.0] * 6, saved=10, memory=50.0)
    assert fitting_cuts(tight, placement, np.array([2, 1]), NONE) == ((0, 2, 6), True)


def test_fitting_cuts_report_that_nothing_fits():
    short = setting_of([1.0] * 6, saved=10, memory=20.0)
    cuts, fit = fitting_cuts(short, np.array([0, 1]), np.array([2, 1]), NONE)
    assert not fit
    assert cuts == (0, 2, 6)  # 2 × 20 bytes on device 0 and 40 bytes on device 1: the smallest peak
