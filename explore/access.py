"""Access to the explorer: only the browser that was opened with the server's address may use it.

The server listens on the loopback interface only. Every request needs the token of its address, which other users of
the machine do not have, and a Host header that names the loopback interface: a page of another site that resolves to
127.0.0.1 (DNS rebinding) has its own name there.
"""

import secrets
from collections.abc import Mapping

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = b"x-panpipe-token"
HOSTS = ("127.0.0.1", "localhost")


def new_token() -> str:
    """A token that cannot be guessed."""
    return secrets.token_urlsafe(24)


class Access:
    """Middleware that refuses requests without the token, or with another Host header.

    Args:
        app: the application.
        token: the token in the server's address.
        port: the server's port.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._hosts = {f"{host}:{port}" for host in HOSTS} | ({*HOSTS} if port == 80 else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if headers.get(b"host", b"").decode("latin-1") not in self._hosts:
            return PlainTextResponse("this server answers only at its own address, 127.0.0.1\n", 421)
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin.removeprefix("http://") not in self._hosts:
            return PlainTextResponse("requests from other sites are refused\n", 403)
        given = headers.get(HEADER, b"").decode("latin-1") or _query_token(scope["query_string"].decode("latin-1"))
        if not secrets.compare_digest(given.encode(), self._token.encode()):
            return PlainTextResponse("open the address that panpipe explore printed: it has a token\n", 403)
        return None


def _query_token(query: str) -> str:
    return next((part[len("token=") :] for part in query.split("&") if part.startswith("token=")), "")
