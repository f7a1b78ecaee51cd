"""How soon the explorer redraws a schedule: from a changed question to the parsed answer, over HTTP.

    python benchmarks/core/explore.py [--record FILE]

16 devices, 64 microbatches. Every question differs from the one before (a slider moved), so that no answer is cached.
With Chromium, the time until the page has drawn it is measured, too.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from panpipe.core.schedules.registry import resident_families

from benchmarks.recording import machine, record

REPEATS = 5
SIZE = {"kind": "uniform", "devices": 16, "microbatches": 64}
DRAWN = ("1f1b", "v-half", "1f1b-v")
"""Drawn in a browser: a usual schedule, and the two whose answers take longest."""
LIMITED = {"zb-1p": 16.0, "zb-2p": 32.0}


def main() -> None:
    """Measure every family, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", metavar="FILE", help="append the table to this Markdown file")
    path = parser.parse_args().record
    server = subprocess.Popen(
        [sys.executable, "-m", "panpipe.cli", "explore", "--no-browser"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("panpipe explore: ").strip()
        rows = [measured(address, family.name) for family in resident_families() if family.name != "building-block"]
        rows += in_a_browser(address)
    finally:
        server.terminate()
        server.wait()
    for row in rows:
        print("{:36} {:>8} {:>8}".format(*row))
    if path is not None:
        title = f"A redrawn schedule of {SIZE['devices']} devices and {SIZE['microbatches']} microbatches"
        record(path, title, machine(), ("schedule", f"median of {REPEATS}", "worst"), rows)


def measured(address: str, name: str) -> tuple[str, str, str]:
    """A schedule with the median and the worst time of its answer."""
    asked(address, name, 1.0)  # imports, and compiled code
    times = []
    for turn in range(REPEATS):
        start = time.perf_counter()
        answer = asked(address, name, 1.05 + 0.05 * turn)
        times.append(time.perf_counter() - start)
        assert "answer" in answer, answer
    return row(name, times)


def row(name: str, times_s: list[float]) -> tuple[str, str, str]:
    """A row of the table."""
    return name, f"{1e3 * statistics.median(times_s):.0f} ms", f"{1e3 * max(times_s):.0f} ms"


def asked(address: str, name: str, forward: float) -> dict[str, dict[str, object]]:
    """The line with the answer; lines about progress, such as of compiling the search, come before it."""
    parts = urllib.parse.urlsplit(address)
    token = urllib.parse.parse_qs(parts.query)["token"][0]
    question = {**SIZE, "schedule": name, "forward": forward, "memory_limit": LIMITED.get(name)}
    request = urllib.request.Request(
        f"http://{parts.netloc}/api/answer", json.dumps({"question": question}).encode(), {"X-Panpipe-Token": token}
    )
    with urllib.request.urlopen(request) as response:
        return next(line for line in map(json.loads, response) if "progress" not in line)


def in_a_browser(address: str) -> list[tuple[str, str, str]]:
    """From the slider's event until the page has drawn the new answer; empty without Chromium or playwright."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return []
    if chromium is None:
        return []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        rows = []
        for name in DRAWN:
            page.goto("about:blank")
            page.goto(f"{address}#a={urllib.parse.quote(json.dumps({**SIZE, 'schedule': name}))}")
            page.locator("[data-memory='predicted 15']").wait_for()
            page.wait_for_timeout(500)
            times_ms = page.evaluate(MOVES)
            rows.append(row(f"{name}, until the page has drawn it", [time_ms / 1e3 for time_ms in times_ms]))
        browser.close()
    return rows


MOVES = """async () => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  const times = [];
  for (let turn = 0; turn < 7; turn += 1) {
    const slider = document.querySelector("input[name=forward]");
    const before = sides.a.answer;
    const start = performance.now();
    slider.value = 1.2 + 0.05 * turn;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    while (sides.a.answer === before) await new Promise((done) => setTimeout(done, 1));
    await painted();
    times.push(performance.now() - start);
    await new Promise((done) => setTimeout(done, 400));
  }
  return times;
}"""


if __name__ == "__main__":
    main()
