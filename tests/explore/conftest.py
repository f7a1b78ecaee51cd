"""A server of the explorer, and a page of it in a browser, shared by the tests of this folder."""

import subprocess
import sys
from contextlib import contextmanager

import pytest

from ..support.browser import CHROMIUM
from ..support.launch import HANGS_S


@contextmanager
def explorer(*words, **more):
    """A running ``panpipe explore --no-browser``; yields its address."""
    command = [sys.executable, "-m", "panpipe", "explore", "--no-browser", *map(str, words)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **more)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().removeprefix("panpipe explore: ").strip()
    finally:
        server.terminate()
        server.wait(HANGS_S)
        server.stdout.close()


@pytest.fixture(scope="session")
def address():
    with explorer() as found:
        yield found


@pytest.fixture(scope="module")
def chromium():
    """Chromium, driven by playwright, whose event loop runs in this thread until the fixture ends."""
    driver = pytest.importorskip("playwright.sync_api")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """An empty page 1,400 pixels wide; anything on its console fails the test."""
    page = chromium.new_page(viewport={"width": 1400, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.set_default_timeout(HANGS_S * 1000)
    yield page
    page.close()
    assert said == []
