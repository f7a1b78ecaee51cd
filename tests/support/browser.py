"""Pages as a browser sees them: their tags, and what a probe inside them finds."""

import json
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from .launch import HANGS_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FRAMES = "<script>window.requestAnimationFrame = (paint) => setTimeout(() => paint(performance.now()), 16);</script>"
"""Frames by timer: virtual time runs past real frames when the machine is busy, but never past a timer."""

NEEDED = os.environ.get("PANPIPE_BROWSER") == "needed"
"""Whether a machine promises a browser: then its absence fails these tests, and does not skip them."""

in_a_browser = pytest.mark.skipif(CHROMIUM is None and not NEEDED, reason="needs Chromium on PATH")


def probed(text: str, probe: str, folder: Path, size: str = "1280,2400") -> Any:
    """What a script, added at the page's end, left as JSON in the body's ``data-found``.

    The pages allow their own inline scripts, and so the probe as well.
    """
    assert CHROMIUM is not None, "no Chromium on PATH: install it (apt-get install chromium)"
    page = folder / "page.html"
    page.write_text(text.replace("<body", FRAMES + "<body", 1).replace("</body>", probe + "</body>"), encoding="utf-8")
    result = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={size}",
            "--virtual-time-budget=3000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=True,
        encoding="utf-8",
    )
    body = next(attributes for tag, attributes in Page(result.stdout).tags if tag == "body")
    return json.loads(body["data-found"] or "")


class Page(HTMLParser):
    """Collects every tag with its attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] in self.texts:
            self.texts[self.tags[-1][0]][-1] += data

    @property
    def data(self) -> dict:
        return json.loads(self.texts["script"][0])
