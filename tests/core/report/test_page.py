"""The report: one file that loads nothing, has all data, and is drawn in a browser."""

import re

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.plan.plan import Plan, Stage
from panpipe.core.report.data import Check, Checked, ReportFacts
from panpipe.core.report.page import report_html, write_report
from panpipe.core.timing.idle import CAUSES, FILL_AND_DRAIN, SHARED_LINKS, IdleTime
from panpipe.core.trace.trace import LinkTrack, Trace
from panpipe.simulators.run import simulate

from ...support.browser import Page, in_a_browser, probed
from ...support.plans import scheduled

FORWARD_S, BACKWARD_S, HOP_S = 0.010, 0.021, 0.0012
STATE = {"parameters": 40_000_000, "gradients": 40_000_000, "optimizer": 80_000_000}
SAVED, MESSAGE, WORK = 30_000_000, 2_000_000, 9_000_000


def synthetic_plan(devices: int, microbatches: int) -> Plan:
    nodes = [f"transformer.h.{layer}.{part}/addmm" for layer in range(8) for part in ("attn.c_attn", "mlp.c_fc")]
    size = len(nodes) // devices
    cost = StageCosts(
        FORWARD_S, BACKWARD_S / 2, BACKWARD_S / 2, optimizer_s=0.004, parameter_bytes=STATE["parameters"],
        gradient_bytes=STATE["gradients"], optimizer_bytes=STATE["optimizer"], saved_bytes=SAVED, workspace_bytes=WORK,
    )  # fmt: skip
    plan = scheduled(
        "1f1b", devices, microbatches, costs=[cost] * devices,
        edges=[StageEdge(d, d + 1, MESSAGE, MESSAGE) for d in range(devices - 1)],
        cluster=fully_connected(devices, 320_000_000, MESSAGE / HOP_S, 0.0),
    )  # fmt: skip
    stages = tuple(Stage(d, d, tuple(nodes[d * size : (d + 1) * size]), ("w",) * 6) for d in range(devices))
    return evolve(plan, model="gpt2", schedule="1f1b", stages=stages)


def traces(plan: Plan) -> tuple[Trace, Trace]:
    """The simulated step with the rates of a link, and a slower one in the place of a measured one."""
    links = (
        LinkTrack("gpu0", "gpu1", 2e9, (0.01, 0.011, 0.02, 0.022), (2e9, 0.0, 1e9, 0.0)),
        LinkTrack("gpu1", "gpu0", float("inf"), (), ()),
    )
    trace = evolve(simulate(plan).trace, links=links)
    later = tuple(evolve(event, start_s=1.05 * event.start_s, end_s=1.05 * event.end_s) for event in trace.events)
    return trace, evolve(trace, source="measured", events=later, step_s=1.05 * trace.step_s)


def inputs(devices: int, microbatches: int = 8) -> dict:
    plan = synthetic_plan(devices, microbatches)
    predicted, measured = traces(plan)
    facts = ReportFacts(
        title="GPT-2 over two workers <script>",
        losses=tuple(5.5 * 0.97**i + 0.2 for i in range(60)),
        reference_losses=tuple(5.5 * 0.97**i + 0.2 for i in range(60)),
        step_times_s=tuple(0.305 + 0.004 * (i * 7 % 5) for i in range(30)),
        one_process_step_s=0.52,
        checks=(
            Check("loss equals one process", "0 of 60 steps differ", True),
            Check("gradients equal one process", "0.2 relative", False),
            Check("predicted step within 10 %", "12.3 %", False, Checked.PREDICTION),
            Check("samples a second", "104"),
        ),
        notes=("Both workers ran on one machine.",),
        idle=IdleTime(
            0.3, 0.25, dict.fromkeys(CAUSES, 0.0) | {FILL_AND_DRAIN: 0.03, SHARED_LINKS: 0.02}, {"gpu0 → gpu1": 0.02}
        ),
    )
    return {
        "plan": plan,
        "predicted": predicted,
        "measured": measured,
        "facts": facts,
    }


@pytest.mark.parametrize("devices", [2, 4])
def test_report_is_one_file_that_loads_nothing(devices):
    text = report_html(**inputs(devices))
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in {"iframe", "object", "embed", "img", "base"}
        for name in ("src", "href", "action", "data", "srcset"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|import)\s*\(", text)
    # The one address names the SVG vocabulary; nothing is loaded from it.
    assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert "default-src 'none'" in policy


@pytest.mark.parametrize("devices", [2, 4])
def test_report_has_every_action_and_figure(devices):
    given = inputs(devices)
    data = Page(report_html(**given)).data
    for drawn, trace in zip(data["traces"], (given["predicted"], given["measured"]), strict=True):
        events = drawn["events"]
        rows = zip(*(events[name] for name in ("device", "queue", "kind", "stage", "microbatch", "peer")), strict=True)
        expected = [
            (e.device, e.queue, e.action.kind, e.action.stage, e.action.microbatch, e.action.peer) for e in trace.events
        ]
        assert list(rows) == expected
        assert events["start"] == pytest.approx([e.start_s for e in trace.events], abs=1e-9)
        assert events["end"] == pytest.approx([e.end_s for e in trace.events], abs=1e-9)
        assert drawn["step"] == trace.step_s
    assert data["step"]["measured"] == pytest.approx(0.313)
    assert data["step"]["speedup"] == pytest.approx(0.52 / 0.313)
    assert data["step"]["error"] == pytest.approx(given["predicted"].step_s / 0.313 - 1)
    assert data["limits"] == [320_000_000] * devices
    assert len(data["losses"]) == 60
    assert [check["verdict"] for check in data["checks"]] == [True, False, False, None]
    assert [check["about"] for check in data["checks"]] == ["result", "result", "prediction", "result"]
    compared = [*data["comparison"]["kinds"], *data["comparison"]["transfers"]]
    assert {kind["kind"] for kind in compared} == {e.action.kind for e in given["predicted"].events}


def test_report_has_links_idle_causes_and_modules():
    data = Page(report_html(**inputs(2))).data
    assert data["links"] == [
        {"name": "gpu0 → gpu1", "limit": 2e9, "times": [0.01, 0.011, 0.02, 0.022], "rates": [2e9, 0, 1e9, 0]},
        {"name": "gpu1 → gpu0", "limit": None, "times": [], "rates": []},
    ]
    assert data["idle"]["step_s"] == 0.3
    assert {c["cause"]: c["seconds"] for c in data["idle"]["causes"] if c["seconds"]} == {
        FILL_AND_DRAIN: 0.03,
        SHARED_LINKS: 0.02,
    }
    assert [(c["link"], c["seconds"]) for c in data["idle"]["contention_by_link"]] == [("gpu0 → gpu1", 0.02)]
    assert [stage["modules"] for stage in data["plan"]["stages"]] == [
        "transformer.h.0 … transformer.h.3",
        "transformer.h.4 … transformer.h.7",
    ]


def test_report_has_memory_timelines_and_peaks():
    data = Page(report_html(**inputs(2))).data
    kinds = data["traces"][0]["memory"]["kinds"]
    assert {"parameters", "gradients", "optimizer", "saved", "workspace"} <= set(kinds)
    # 1F1B: the first of two devices holds two microbatches, the second one; in addition to state and workspace.
    state = sum(STATE.values()) + WORK
    # The buffers: what is sent, what has arrived, and on the first device a gradient that waits.
    assert data["peaks"]["devices"][0] == [state + 2 * SAVED + 3 * MESSAGE, state + SAVED + 2 * MESSAGE]
    held, at = data["traces"][0]["memory"]["held"], kinds.index("saved")
    assert [max(row[at] for row in rows) for rows in held] == [2 * SAVED, SAVED]


def test_report_without_measurement_and_facts():
    given = inputs(2)
    data = Page(report_html(plan=given["plan"], predicted=given["predicted"])).data
    assert len(data["traces"]) == 1
    assert data["comparison"] is None
    known = {name: value for name, value in data["step"].items() if value is not None}
    assert known == {"predicted": given["predicted"].step_s, "timed": 0}
    assert data["title"] == "gpt2"
    assert data["idle"] is None
    assert data["summary"] == "gpt2 in 2 stages on 2 devices, 8 microbatches a step, in the order of 1f1b."
    unnamed = evolve(given["plan"], model="")
    data = Page(report_html(plan=unnamed, predicted=given["predicted"])).data
    assert (data["title"], data["summary"][:22]) == ("Pipeline plan", "The graph in 2 stages ")


def test_title_is_escaped_and_a_loss_that_is_not_finite_is_a_gap():
    given = inputs(2)
    facts = evolve(given["facts"], title="</script><b>&", losses=(1.0, float("nan"), 2.0))
    text = report_html(**(given | {"facts": facts}))
    page = Page(text)
    assert page.data["title"] == "</script><b>&"
    assert page.data["losses"] == [1.0, None, 2.0]
    assert "<b>" not in text
    assert "&lt;/script&gt;&lt;b&gt;&amp; · panpipe" in text


def test_same_input_gives_the_same_bytes(tmp_path):
    for name in ("a.html", "b.html"):
        write_report(tmp_path / name, **inputs(2))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


PROBE = """<script>
addEventListener("load", () => requestAnimationFrame(() => requestAnimationFrame(() => {
  const found = {};
  const { view } = page;
  const details = document.querySelector("[data-id=details]");
  const canvas = document.querySelector("[data-chart=predicted]");
  const inked = (from) => {
    const pixels = from.getContext("2d").getImageData(0, 0, from.width, from.height).data;
    const tones = new Set();
    for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] === 255) tones.add(pixels.slice(i, i + 3).join());
    return tones.size;
  };
  found.tones = [...document.querySelectorAll("canvas")].map(inked);
  const box = canvas.getBoundingClientRect();
  const at = (x, y, more) => ({ clientX: box.left + x, clientY: box.top + y, bubbles: true, pointerId: 1, ...more });
  canvas.dispatchEvent(new PointerEvent("pointermove", at(122, 46)));
  found.tip = details.hidden ? null : details.textContent;
  found.before = [view.from, view.to];
  canvas.dispatchEvent(new WheelEvent("wheel", at(300, 46, { ctrlKey: true, deltaY: -300 })));
  found.wheel = [view.from, view.to];
  document.querySelector("[data-zoom=all]").click();
  found.all = [view.from, view.to];
  found.causes = [...document.querySelectorAll("[data-id=idle-causes] .name")].map((name) => name.textContent);
  const links = document.querySelector("[data-links]");
  const strip = links.getBoundingClientRect();
  const there = 230 + (0.0105 / view.full) * (strip.width - 230 - 52);
  const aim = { clientX: strip.left + there, clientY: strip.top + 36, pointerId: 1 };
  links.dispatchEvent(new PointerEvent("pointermove", aim));
  found.link = details.textContent;
  found.wide = document.documentElement.scrollWidth <= innerWidth;
  found.sections = [...document.querySelectorAll("section:not([hidden])")].map((section) => section.dataset.id);
  document.body.dataset.found = JSON.stringify(found);
})));
</script>"""


@in_a_browser
def test_report_is_drawn_in_a_browser(tmp_path):
    found = probed(report_html(**inputs(2)), PROBE, tmp_path, "1280,4400")
    assert len(found["tones"]) == 7
    assert min(found["tones"]) > 4
    assert found["tip"].startswith("forward · microbatch 0")
    assert "measured start" in found["tip"]
    assert found["wheel"][1] - found["wheel"][0] < 0.5 * (found["before"][1] - found["before"][0])
    assert found["all"] == found["before"]
    assert found["wide"]
    assert found["causes"] == ["compute", "fill and drain", "shared links", "gpu0 → gpu1"]
    assert found["link"].startswith("gpu0 → gpu1")
    assert "in use100.0\u00a0%" in found["link"]
    sections = ["figures", "step", "idle", "memory", "links", "accuracy", "training", "checks", "plan", "notes"]
    assert found["sections"] == sections


COUNTED = """<script>
const draw = CanvasRenderingContext2D.prototype.fillRect;
let drawn = 0;
CanvasRenderingContext2D.prototype.fillRect = function (...at) {
  drawn += "chart" in this.canvas.dataset;
  draw.apply(this, at);
};
const frames = (count, then) => (count ? requestAnimationFrame(() => frames(count - 1, then)) : then());
addEventListener("load", () => frames(3, () => {
  const found = { nodes: document.querySelectorAll("*").length };
  found.wide = document.documentElement.scrollWidth <= innerWidth;
  drawn = 0;
  page.view.all();
  frames(2, () => {
    found.all = drawn;
    drawn = 0;
    page.view.look(0.4 * page.view.full, 0.41 * page.view.full);
    frames(2, () => {
      found.near = drawn;
      document.body.dataset.found = JSON.stringify(found);
    });
  });
}));
</script>"""


@in_a_browser
@pytest.mark.parametrize("size", ["1280,900", "500,900"])
def test_only_the_visible_part_of_a_large_step_is_drawn(tmp_path, size):
    given = inputs(16, 64)
    assert len(given["predicted"].events) >= 2 * 16 * 64 + 4 * 15 * 64 + 16
    found = probed(report_html(plan=given["plan"], predicted=given["predicted"]), COUNTED, tmp_path, size)
    assert found["wide"]
    assert found["nodes"] < 1000  # of the page: actions are no elements
    assert found["all"] < 8000
    assert found["near"] < 0.1 * found["all"]
