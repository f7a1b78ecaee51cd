"""The explorer's server: its address, its port, and a browser that may be missing."""

import webbrowser

import pytest
from panpipe.core.errors import RequestError

serving = pytest.importorskip("panpipe.explore.serve", reason="needs panpipe[explore]")


class Server:
    """Ends at once; records the sockets that it serves."""

    served: list = []  # noqa: RUF012

    def __init__(self, config):
        self.config = config

    def run(self, sockets):
        self.served.append(sockets[0].getsockname())


class Explorer:
    """Records the token and the port of its application."""

    def application(self, token, number):
        self.token, self.number = token, number
        return object()


@pytest.fixture
def explorer(monkeypatch):
    monkeypatch.setattr(serving.uvicorn, "Server", Server)
    monkeypatch.setattr(serving.uvicorn, "Config", lambda *_, **__: None)
    monkeypatch.setattr(Server, "served", [])
    return Explorer()


def test_address_has_the_port_and_the_token(explorer, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    serving.serve(explorer, port=0, browser=True)
    ((host, number),) = Server.served
    assert (host, number) == ("127.0.0.1", explorer.number)
    assert opened == [f"http://127.0.0.1:{number}/?token={explorer.token}"]
    found = capsys.readouterr()
    assert found.out == f"panpipe explore: {opened[0]}\n"
    assert found.err == "press Ctrl-C to stop the server\n"


def fails(address):
    raise webbrowser.Error


@pytest.mark.parametrize("open_browser", [fails, lambda address: False])
def test_missing_browser_is_reported(explorer, capsys, monkeypatch, open_browser):
    monkeypatch.setattr(webbrowser, "open", open_browser)
    serving.serve(explorer, port=0, browser=True)
    assert "no browser was found: open that address" in capsys.readouterr().err


def test_browser_is_not_opened_unless_it_is_wanted(explorer, capsys, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", fails)
    serving.serve(explorer, port=0, browser=False)
    assert "no browser" not in capsys.readouterr().err


def test_port_in_use_is_refused_with_the_fix():
    with serving.bind(0) as listener:
        number = listener.getsockname()[1]
        with pytest.raises(RequestError, match=f"cannot listen on port {number} of 127.0.0.1: .*; give another --port"):
            serving.bind(number)
