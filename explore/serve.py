"""Starts the explorer: a server on the loopback interface, and a browser that shows its page."""

import socket
import sys
import webbrowser
from urllib.parse import urlencode

import uvicorn

from ..core.errors import RequestError
from .app import Explorer, new_token

HOST = "127.0.0.1"
PORT = 8416
"""The port if none is given and it is free: the same one each time, so that a link opens again after a restart."""


def serve(explorer: Explorer, *, port: int | None, browser: bool) -> None:
    """Serve until interrupted.

    Args:
        port: 0 for any free one; by default ``PORT``, or any free one if it is in use.

    Raises:
        RequestError: the port is in use.
    """
    token = new_token()
    with bind_usual() if port is None else bind(port) as listener:
        number = listener.getsockname()[1]
        address = f"http://{HOST}:{number}/?{urlencode({'token': token})}"
        print(f"panpipe explore: {address}", flush=True)
        if browser and not _opened(address):
            print(
                "no browser was found: open that address in one on this machine, or forward its port", file=sys.stderr
            )
        print("press Ctrl-C to stop the server", file=sys.stderr, flush=True)
        config = uvicorn.Config(
            explorer.application(token, number), log_level="warning", access_log=False, timeout_graceful_shutdown=1
        )
        uvicorn.Server(config).run(sockets=[listener])


def bind_usual() -> socket.socket:
    """A socket on ``PORT``, or on any free port."""
    try:
        return bind(PORT)
    except RequestError:
        return bind(0)


def bind(port: int) -> socket.socket:
    """A socket of the loopback interface.

    Raises:
        RequestError: the port is in use, or needs rights that this user does not have.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(100)
    except OSError as error:
        listener.close()
        raise RequestError(
            f"cannot listen on port {port} of {HOST}: {error.strerror}; give another --port, or none for a free one"
        ) from None
    return listener


def _opened(address: str) -> bool:
    """Whether a browser was opened."""
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
