"""The explorer in a browser, end to end."""

import json
import re

from panpipe.cli import main

from ..support.browser import in_a_browser


def shows(page, text, side="a"):
    """Wait until a side has an answer whose title matches."""
    from playwright.sync_api import expect

    expect(page.locator(f"[data-side={side}] h1")).to_have_text(re.compile(text))


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
    page.goto("about:blank")
    page.goto(again)
    shows(page, "zb-v")
    assert page.locator("select[name=schedule]").input_value() == "zb-v"
