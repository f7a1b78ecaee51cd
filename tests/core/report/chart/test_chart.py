"""Pictures of schedules: every action is drawn, and memory and phases equal those of the evaluation."""

import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from attrs import evolve
from panpipe.core.actions import Kind, parse_action
from panpipe.core.costs.costs import StageCosts
from panpipe.core.report.chart import comparison_svg, schedule_svg, step_svg
from panpipe.core.report.chart.curve import curves_of, phases
from panpipe.core.report.schedule import schedule_data, schedule_html
from panpipe.core.schedules.problem import Schedule, ScheduleProblem
from panpipe.core.schedules.registry import families, find_family
from panpipe.core.schedules.scored import score
from panpipe.simulators.run import simulate

from ....support.browser import Page, in_a_browser, probed
from ....support.plans import scheduled

SVG = "{http://www.w3.org/2000/svg}"


def scored(name="v-half", devices=4, microbatches=6, limit=None):
    family = find_family(name)
    chunks = family.usual_chunks
    costs = (StageCosts(5.0, 6.0, 4.0, saved_bytes=1, freed_by_input_bytes=0.25),) * (devices * chunks)
    limit = 3.0 if limit is None and name.startswith("zb-") and name[-1] == "p" else limit
    limit = None if limit is None else limit * chunks
    problem = ScheduleProblem(devices, microbatches, chunks, costs, 1.0, limit)
    return score(problem, family.build(problem))


def drawn(picture):
    """The groups of actions in an SVG."""
    return [group for group in ET.fromstring(picture).iter(f"{SVG}g") if "a" in group.get("class", "").split()]


NAMES = sorted(name for name, family in families().items() if name != "building-block")


@pytest.mark.parametrize("name", NAMES)
def test_every_action_is_drawn_on_its_device_at_its_time(name):
    given = scored(name)
    groups = iter(drawn(schedule_svg(given)))
    right = 0.0
    for actions, starts, ends in zip(
        given.schedule.device_actions, given.result.starts, given.result.ends, strict=True
    ):
        for action, start, end in zip(actions, starts, ends, strict=True):
            group = next(groups)
            title = group.find(f"{SVG}title").text
            assert title.startswith(f"{action}: ")
            assert title.endswith(f"{start:.6g} to {end:.6g}")
            assert group.get("data-m") == str(action.microbatch)
            box = group.find(f"{SVG}rect")
            right = max(right, float(box.get("x")) + float(box.get("width")))
            assert float(box.get("width")) > 0
    assert next(groups, None) is None
    frame = ET.fromstring(schedule_svg(given)).find(f".//{SVG}rect[@class='lane']")
    assert right <= float(frame.get("width"))


@pytest.mark.parametrize("name", NAMES)
def test_memory_curve_has_the_evaluation_s_peak_and_ends_at_zero(name):
    given = scored(name)
    for curve, peak in zip(curves_of(given), given.result.peak_memory, strict=True):
        assert max(held for _, held in curve) == pytest.approx(peak / given.problem.chunks)
        assert curve[-1][1] == pytest.approx(0)
        times = [time for time, _ in curve]
        assert times == sorted(set(times))


def test_memory_curve_equals_one_computed_by_hand():
    # One device: F takes 2 of 2, I frees half of it, W the rest; each takes one unit of time.
    costs = (StageCosts(1.0, 1.0, 1.0, saved_bytes=2, freed_by_input_bytes=1),)
    order = tuple(parse_action(text) for text in ("0F0", "0I0", "0F1", "0W0", "0B1"))
    given = score(ScheduleProblem(1, 2, 1, costs), Schedule("by-hand", (0,), 2, (order,)))
    assert curves_of(given) == [[(0.0, 2.0), (2.0, 3.0), (4.0, 2.0), (6.0, 0.0)]]


def test_phases_equal_those_computed_by_hand():
    given = scored("1f1b", devices=2, microbatches=3)
    moments = [
        phases(actions, starts, ends)
        for actions, starts, ends in zip(
            given.schedule.device_actions, given.result.starts, given.result.ends, strict=True
        )
    ]
    first, last = moments
    backward = given.schedule.device_actions[0].index(parse_action("0B0"))
    assert first.steady == given.result.starts[0][backward]
    assert first.cooling == given.result.ends[0][given.schedule.device_actions[0].index(parse_action("0F2"))]
    assert (last.start, last.steady) == (6.0, 11.0)
    assert last.end == given.result.ends[1][-1]


def test_kinds_and_phases_have_different_colours():
    picture = schedule_svg(scored())
    classes = Counter(group.get("class").split()[1] for group in drawn(picture))
    assert classes == dict.fromkeys(("f0", "f1", "i0", "i1", "w0", "w1"), 24)
    rules = picture[picture.index("<style>") : picture.index("</style>")]
    fills = [rules.split(f".{name} rect{{fill:")[1].split("}")[0] for name in classes]
    assert len(set(fills)) == 6
    assert {Kind.F, Kind.I, Kind.W} == {
        parse_action(g.find(f"{SVG}title").text.split(":")[0]).kind for g in drawn(picture)
    }
    for name in ("warm-up", "steady state", "cool-down"):
        assert picture.count(f"<title>{name} of device") == 4


def test_memory_limit_is_drawn_if_there_is_one():
    assert 'class="limit"' not in schedule_svg(scored())
    assert schedule_svg(scored("v-half", limit=3)).count('class="limit"') == 4


@pytest.mark.parametrize("draw", [schedule_svg, schedule_html])
def test_picture_is_deterministic_and_loads_nothing(draw):
    text = draw(scored())
    assert text == draw(scored())
    assert set(re.findall(r"https?:[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}


def test_names_are_escaped_in_the_picture():
    given = scored("1f1b", 2, 2)
    hostile = score(given.problem, evolve(given.schedule, name="</svg><script>&"))
    assert ET.fromstring(schedule_svg(hostile)).find(f"{SVG}title").text == "</svg><script>&"
    assert Page(schedule_html(hostile)).texts["title"][0].startswith("</svg><script>&")


def test_schedule_without_durations_is_drawn():
    problem = ScheduleProblem(2, 2, 1, (StageCosts(0, 0, 0, saved_bytes=0),) * 2)
    picture = schedule_svg(score(problem, find_family("1f1b").build(problem)))
    assert len(drawn(picture)) == 8


PROBE = """<script>
addEventListener("load", () => requestAnimationFrame(() => requestAnimationFrame(() => {
  const found = {};
  const canvas = document.querySelector("[data-chart=predicted]");
  const box = canvas.getBoundingClientRect();
  const at = { clientX: box.left + 122, clientY: box.top + 46, bubbles: true, pointerId: 1 };
  canvas.dispatchEvent(new PointerEvent("pointermove", at));
  found.details = document.querySelector("[data-id=details]").textContent;
  found.figures = [...document.querySelectorAll(".figure .big")].map((figure) => figure.textContent);
  found.charts = document.querySelectorAll("canvas").length;
  found.wide = document.documentElement.scrollWidth <= innerWidth;
  document.body.dataset.found = JSON.stringify(found);
})));
</script>"""


@in_a_browser
def test_page_of_a_schedule_has_its_units_and_details_under_the_pointer(tmp_path):
    given = scored()
    found = probed(schedule_html(given), PROBE, tmp_path)
    assert found["details"].startswith("forward · microbatch 0")
    assert found["details"].endswith("duration5")  # without a unit
    assert found["figures"][0] == f"{given.result.makespan:g}"
    assert found["charts"] == 5  # the step, and the memory of four devices
    assert found["wide"]


def measured_pair():
    """A plan's simulated step, and the same one with other times and measured memory."""
    trace = simulate(scheduled("v-half", 2, 4, chunks=2)).trace
    later = [evolve(event, start_s=1.1 * event.start_s, end_s=1.1 * event.end_s) for event in trace.events]
    saved = [sample for sample in trace.memory if sample.kind == "saved"]
    return trace, evolve(trace, source="measured", events=tuple(later), memory=tuple(saved), step_s=1.1 * trace.step_s)


def test_comparison_has_every_compute_action_of_both_steps_on_its_device():
    predicted, measured = measured_pair()
    picture = ET.fromstring(comparison_svg(predicted, measured, "v-half"))
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
    pictures = [comparison_svg(*measured_pair(), "<script>") for _ in range(2)]
    assert pictures[0] == pictures[1]
    assert "<script>" not in pictures[0]
    assert "href" not in pictures[0]


def test_picture_of_one_step_has_every_compute_action_once():
    predicted, _ = measured_pair()
    picture = step_svg(predicted, "v-half")
    titles = [title.text for title in ET.fromstring(picture).iter(f"{SVG}title")]
    assert len(titles) == 1 + sum(event.queue == "compute" for event in predicted.events)
    assert "measured" not in picture.split("</style>")[1]


def test_page_of_a_schedule_has_fractions_of_memory_and_the_evaluation_s_peaks():
    given = scored("v-half")
    data = schedule_data(given)
    held = data["traces"][0]["memory"]["held"]
    peaks = [max(value for (value,) in rows) for rows in held]
    assert peaks == pytest.approx([peak / 2 for peak in given.result.peak_memory])
    assert data["peaks"]["devices"] == [pytest.approx(peaks)]
    assert any(value % 1 for rows in held for (value,) in rows)
