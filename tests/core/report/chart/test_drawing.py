"""Pictures of schedules: every action at its time, colours of phases, memory limits, escaped names."""

import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from attrs import evolve
from panpipe.core.actions import Kind, parse_action
from panpipe.core.costs.costs import StageCosts
from panpipe.core.report.schedule import curves_of, schedule_html, schedule_svg
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families, find_family
from panpipe.core.schedules.scored import score

from ....support.browser import Page, in_a_browser, probed

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture):
    """The groups of actions in an SVG."""
    return [group for group in ET.fromstring(picture).iter(f"{SVG}g") if "a" in group.get("class", "").split()]


NAMES = sorted(name for name, family in families().items() if name != "building-block")


def scored(name="v-half", devices=4, microbatches=6, limit=None):
    family = find_family(name)
    chunks = family.usual_chunks
    costs = (StageCosts(5.0, 6.0, 4.0, saved_bytes=1, freed_by_input_bytes=0.25),) * (devices * chunks)
    limit = 3.0 if limit is None and name.startswith("zb-") and name[-1] == "p" else limit
    limit = None if limit is None else limit * chunks
    problem = ScheduleProblem(devices, microbatches, chunks, costs, 1.0, limit)
    return score(problem, family.build(problem))


@pytest.mark.parametrize("name", NAMES)
def test_memory_curve_has_the_evaluation_s_peak_and_ends_at_zero(name):
    given = scored(name)
    for curve, peak in zip(curves_of(given), given.result.peak_memory, strict=True):
        assert max(held for _, held in curve) == pytest.approx(peak / given.problem.chunks)
        assert curve[-1][1] == pytest.approx(0)
        times = [time for time, _ in curve]
        assert times == sorted(set(times))


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
            assert group.find(f"{SVG}title").text == f"{action}: {start:.5g} to {end:.5g}"
            box = group.find(f"{SVG}rect")
            right = max(right, float(box.get("x")) + float(box.get("width")))
            assert float(box.get("width")) > 0
    assert next(groups, None) is None
    frame = ET.fromstring(schedule_svg(given)).find(f".//{SVG}rect[@class='lane']")
    assert right <= float(frame.get("width"))


def test_kinds_have_different_colours():
    picture = schedule_svg(scored())
    classes = Counter(group.get("class").split()[1] for group in drawn(picture))
    assert classes == dict.fromkeys(("f0", "f1", "i0", "i1", "w0", "w1"), 24)
    rules = picture[picture.index("<style>") : picture.index("</style>")]
    fills = [rules.split(f".{name} rect{{fill:")[1].split("}")[0] for name in classes]
    assert len(set(fills)) == 6
    assert {Kind.F, Kind.I, Kind.W} == {
        parse_action(g.find(f"{SVG}title").text.split(":")[0]).kind for g in drawn(picture)
    }


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
    assert found["details"].endswith("duration5\xa0time units")
    assert found["figures"][0] == f"{given.result.makespan:g}time units"
    assert found["charts"] == 5  # the step, and the memory of four devices
    assert found["wide"]
