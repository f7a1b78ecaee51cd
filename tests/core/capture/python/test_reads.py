"""Reads of Python values: what has changed between two steps, and where."""

import math

import pytest
from panpipe.core.capture.python.reads import Reads
from torch import nn

SETTINGS = {"scale": 2.0, "names": ["a"], "nan": math.nan, "unused": None}


def step(model, batch):
    names = SETTINGS["names"]
    return model(batch).sum() * SETTINGS["scale"] * len(names) + SETTINGS["nan"]


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    for key, value in SETTINGS.items():
        monkeypatch.setitem(SETTINGS, key, list(value) if isinstance(value, list) else value)


def change_scale(model):
    SETTINGS["scale"] = 3.0


def add_name(model):
    SETTINGS["names"].append("b")


def exchange_name(model):
    SETTINGS["names"][0] = "c"


def evaluate(model):
    model[1].eval()


def freeze(model):
    model[0].weight.requires_grad_(False)


def convert(model):
    model[0].weight.data = model[0].weight.data.double()


CHANGES = {
    change_scale: "SETTINGS['scale']",
    add_name: "len(SETTINGS['names'])",
    exchange_name: "SETTINGS['names'][0]",
    evaluate: "model.1.training",
    freeze: "model.0.weight.requires_grad",
    convert: "model.0.weight",
}


@pytest.mark.parametrize(("change", "place"), CHANGES.items(), ids=lambda value: getattr(value, "__name__", None))
def test_change_is_seen_and_named(model, change, place):
    before = Reads(model, step)
    assert before.unchanged()
    change(model)
    assert not before.unchanged()
    after = Reads(model, step)
    assert after.key != before.key
    assert place in set(before.others(after))
    assert before.first_other(after) is not None


def test_nothing_has_changed_without_a_change(model):
    before, after = Reads(model, step), Reads(model, step)
    assert before.unchanged()
    assert before.key == after.key
    assert before.first_other(after) is None
    places = list(before.values)
    assert before.digest(places) == after.digest(places)


def test_equal_value_that_is_another_object_is_no_other_value(model):
    before = Reads(model, step)
    SETTINGS["names"] = ["a"]
    assert before.key == Reads(model, step).key


def test_digest_is_over_the_places_that_are_given(model):
    before = Reads(model, step)
    change_scale(model)
    after = Reads(model, step)
    scale, names = "SETTINGS['scale']", "len(SETTINGS['names'])"
    assert before.digest([scale]) != after.digest([scale])
    assert before.digest([names]) == after.digest([names])


def test_text_and_line_of_a_place(model):
    reads = Reads(model, step)
    assert reads.text("SETTINGS['scale']") == "2.0"
    assert reads.text("no such place") == "None"
    assert reads.line("SETTINGS['scale']").startswith(f"{__file__}:")


def test_replayed_step_reads_what_the_recorded_one_reads(model):
    def replay(held, batch):
        raise AssertionError("reads run nothing")

    replay.recorded_from = (model, step)
    assert Reads(nn.Linear(1, 1), replay).key == Reads(model, step).key
