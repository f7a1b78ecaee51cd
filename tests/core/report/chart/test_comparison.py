"""The picture of a predicted step over a measured one: every action of both, peaks, and nothing loaded."""

import xml.etree.ElementTree as ET

from attrs import evolve
from panpipe.core.report.chart.steps import steps_svg
from panpipe.simulators.run import simulate

from ....support.plans import scheduled

SVG = "{http://www.w3.org/2000/svg}"


def measured_pair():
    """A plan's simulated step, and the same one with other times and measured memory."""
    trace = simulate(scheduled("v-half", 2, 4, chunks=2)).trace
    later = [evolve(event, start_s=1.1 * event.start_s, end_s=1.1 * event.end_s) for event in trace.events]
    saved = [sample for sample in trace.memory if sample.kind == "saved"]
    return trace, evolve(trace, source="measured", events=tuple(later), memory=tuple(saved), step_s=1.1 * trace.step_s)


def test_comparison_has_every_compute_action_of_both_steps_on_its_device():
    predicted, measured = measured_pair()
    picture = ET.fromstring(steps_svg((predicted, measured), "v-half"))
    titles = [title.text for title in picture.iter(f"{SVG}title")]
    unit = 1.0 if measured.step_s >= 1 else 1e3
    for name, trace in (("predicted", predicted), ("measured", measured)):
        for event in trace.events:
            wanted = f"{event.action}, {name}: {unit * event.start_s:.5g} to {unit * event.end_s:.5g}"
            assert (wanted in titles) == (event.queue == "compute")
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert sum(text.startswith("step predicted") and text.endswith("-9.1%") for text in texts) == 1
    peaks = [max(s.bytes for s in predicted.memory if s.kind == "saved" and s.device == d) / 1e6 for d in range(2)]
    assert [text for text in texts if text.startswith("measured ")] == [f"measured {peak:.1f} MB" for peak in peaks]


def test_comparison_is_deterministic_loads_nothing_and_escapes_its_title():
    pictures = [steps_svg(measured_pair(), "<script>") for _ in range(2)]
    assert pictures[0] == pictures[1]
    assert "<script>" not in pictures[0]
    assert "href" not in pictures[0]


def test_picture_of_one_step_has_every_compute_action_once():
    predicted, _ = measured_pair()
    picture = steps_svg((predicted,), "v-half")
    titles = [title.text for title in ET.fromstring(picture).iter(f"{SVG}title")]
    assert len(titles) == 1 + sum(event.queue == "compute" for event in predicted.events)
    assert "measured" not in picture.split("</style>")[1]
