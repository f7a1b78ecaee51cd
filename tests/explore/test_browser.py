"""The explorer in a browser, end to end."""

import json
import re
from urllib.parse import quote

from panpipe.cli import main
from panpipe.explore.question import PlanQuestion, parse_question

from ..support.browser import in_a_browser
from ..support.launch import HANGS_S


def shows(page, text, side="a"):
    """Wait until a side has an answer whose title matches."""
    from playwright.sync_api import expect

    expect(page.locator(f"[data-side={side}] h1")).to_have_text(re.compile(text), timeout=HANGS_S * 1000)


@in_a_browser
def test_a_slider_redraws_the_schedule_and_its_command_line_has_the_same_answer(page, address, capsys):
    page.goto(address)
    shows(page, "^1f1b$")
    page.locator("input[name=devices]").fill("6")
    page.locator("[data-memory='predicted 5']").wait_for()
    page.locator("select[name=schedule]").select_option("zb-h1")
    shows(page, "^zb-h1$")
    words = page.locator("#command").text_content().split()
    assert words[:3] == ["panpipe", "schedule", "zb-h1"]
    assert main([*words[1:], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    shown = page.evaluate("() => sides.a.answer.figures")
    assert shown["makespan"] == printed["makespan"]
    assert shown["bubble_ratio"] == printed["bubble_ratio"]
    assert shown["peak_memory"] == max(printed["peak_memory"])
    events = page.evaluate("() => sides.a.answer.report.traces[0].events")
    rows = list(zip(*(events[name] for name in ("device", "stage", "kind", "microbatch")), strict=True))
    for device, actions in enumerate(printed["device_actions"]):
        assert [f"{stage}{kind}{m}" for d, stage, kind, m in rows if d == device] == actions


@in_a_browser
def test_a_point_of_the_frontier_can_be_chosen_and_the_address_has_it(page, address):
    page.goto(address)
    page.locator("circle[data-family=zb-v]").first.click()
    shows(page, "zb-v")
    page.wait_for_url(re.compile("zb-v"))
    again = page.url
    assert "token" not in again
    page.goto("about:blank")
    page.goto(again)
    shows(page, "zb-v")
    assert page.locator("select[name=schedule]").input_value() == "zb-v"


@in_a_browser
def test_two_sides_share_the_span_and_the_cursor(page, address):
    page.goto(address)
    shows(page, "^1f1b$")
    page.locator("#pin").click()
    page.locator("select[name=schedule]").select_option("gpipe")
    shows(page, "^gpipe$", side="b")
    shows(page, "^1f1b$", side="a")
    page.locator("[data-side=a] [data-chart]").hover(position={"x": 300, "y": 60})
    assert page.evaluate("() => sides.a.view === sides.b.view && view.cursor !== null")
    whole = page.evaluate("() => view.to - view.from")
    page.keyboard.press("w")
    near = page.evaluate("() => [view.from, view.to - view.from]")
    assert near[1] < 0.8 * whole
    page.keyboard.press("d")
    assert page.evaluate("() => view.from") > near[0]
    page.keyboard.press("s")
    page.keyboard.press("0")
    assert page.evaluate("() => view.to - view.from") == whole
    page.wait_for_url(re.compile("b=.*gpipe"))


@in_a_browser
def test_parts_of_two_sides_are_next_to_each_other_also_if_one_does_not_fit(page, address):
    from playwright.sync_api import expect

    limited = {"kind": "uniform", "schedule": "1f1b", "devices": 4, "memory_limit": 3.0}
    sides = {"a": json.dumps(limited), "b": json.dumps({**limited, "schedule": "v-half"})}
    page.goto(f"{address}#a={quote(sides['a'])}&b={quote(sides['b'])}")
    for side in "ab":
        expect(page.locator(f"[data-side={side}] [data-id=idle]")).to_be_visible(timeout=HANGS_S * 1000)
    assert page.locator(".misfit").count() == 1
    for part in ("figures", "step", "idle", "memory"):
        tops = page.locator(f".panel [data-id={part}]").evaluate_all("parts => parts.map((part) => part.offsetTop)")
        assert len(set(tops)) == 1, (part, tops)


@in_a_browser
def test_address_of_two_sides_opens_both_with_the_causes_of_their_idle_time(page, address):
    from playwright.sync_api import expect

    sides = {name: json.dumps({"kind": "uniform", "schedule": name, "devices": 3}) for name in ("1f1b", "gpipe")}
    page.goto(f"{address}#a={quote(sides['1f1b'])}&b={quote(sides['gpipe'])}&side=b")
    for side in "ab":
        expect(page.locator(f"[data-side={side}] [data-id=idle]")).to_be_visible(timeout=HANGS_S * 1000)


@in_a_browser
def test_paper_has_charts_drawn_for_its_width(page, address):
    page.goto(address)
    shows(page, "^1f1b$")
    width = "() => document.querySelector('[data-chart]').clientWidth"
    assert page.evaluate(width) > 704
    page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(width) <= 704
    page.evaluate("() => window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(width) > 704


@in_a_browser
def test_a_model_is_searched_on_a_click_and_takes_the_old_answer_away(page, address):
    page.goto(address)
    shows(page, "^1f1b$")
    page.locator("circle[data-family]").first.wait_for()
    with page.expect_download() as saved:
        page.locator("[data-file=plan]").click()
    assert saved.value.suggested_filename == "schedule.csv"
    page.get_by_text("a model", exact=True).click()
    page.get_by_role("button", name="Search a plan").wait_for()
    assert page.locator("circle[data-family]").count() == 0
    assert page.locator("h1").count() == 0
    assert not page.locator("#progress").is_visible()
    page.go_back()
    shows(page, "^1f1b$")
    page.go_forward()
    page.get_by_role("button", name="Search a plan").wait_for()


@in_a_browser
def test_bad_input_gets_a_sentence_and_no_answer_to_another_question(page, address):
    page.goto(address)
    shows(page, "^1f1b$")
    page.locator("input[name=devices-number]").fill("1000")
    page.locator("input[name=devices-number]").blur()
    page.get_by_text("devices is 1000: give a number from 1 to 256.").wait_for()
    assert page.locator("h1").count() == 0
    page.locator("input[name=devices-number]").fill("6")
    page.locator("input[name=devices-number]").blur()
    page.locator("[data-memory='predicted 5']").wait_for()
    cut_off = """() => {
        window.fetch = async () => new Response('{"progress":{}}\\n', { headers: { 'Content-Type': 'text/x' } });
    }"""
    page.evaluate(cut_off)
    page.locator("select[name=schedule]").select_option("gpipe")
    page.get_by_text("The server's answer was cut off").wait_for()
    assert page.locator("h1").count() == 0


@in_a_browser
def test_every_choice_of_a_form_can_be_taken_back(page, address):
    page.goto(address)
    shows(page, "^1f1b$")
    page.evaluate("() => showForm(complete({ kind: 'plan' }), (question) => { window.asked = question; })")
    page.locator("#form summary").click()
    choices = ("offload", "auto", "auto", ""), ("kernels", "fused", "fused", "eager"), ("layers", "true", True, "")
    for name, option, asked, default in choices:
        page.locator(f"select[name={name}]").select_option(option)
        assert page.evaluate("() => window.asked")[name] == asked
        page.locator(f"select[name={name}]").select_option(default)
        assert parse_question(page.evaluate("() => window.asked")) == PlanQuestion()


@in_a_browser
def test_page_says_that_the_server_does_not_answer(page, address):
    page.goto(address)
    shows(page, "^1f1b$")
    page.locator("[data-side=a] [data-id=idle]").wait_for()
    page.evaluate("() => { window.fetch = () => Promise.reject(new Error('it is gone')); }")
    page.evaluate("() => askSlowAnswers(sides.a)")
    page.get_by_text("The server does not answer: it is gone").wait_for()
    page.evaluate("() => showError('')")
    page.evaluate("() => { state.a = complete({ kind: 'plan' }); drawCluster(); }")
    page.get_by_text("The server does not answer: it is gone").wait_for()
    refusal = """() => { window.fetch = async () => new Response("first open the address", {
        status: 403, headers: { "Content-Type": "text/plain" } }); }"""
    page.evaluate(refusal)
    page.evaluate("() => askSlowAnswers(sides.a)")
    page.get_by_text("The server was started again: first open the address").wait_for()


@in_a_browser
def test_page_fits_a_narrow_window_and_prints_every_chart(page, address):
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(address)
    shows(page, "^1f1b$")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("() => new Promise((done) => setTimeout(done, 400))")
    assert page.evaluate(INKED) == 5  # below the window, too: for screenshots of the whole page
    assert len(page.pdf()) > 10_000


INKED = """() => [...document.querySelectorAll("canvas")].filter((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.some((value) => value > 0);
}).length"""
