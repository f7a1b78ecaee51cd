"""Access to the explorer: only the browser that was opened with the server's address may use it.

The server listens on the loopback interface only. Every request needs the token of the printed address, which other
users of the machine do not have. That address leaves it in a cookie, with which the page opens at addresses without
the token: such a link can be shared, and kept. The page's own requests have it in a header: a page of another site
could send the cookie, and not the header. A request's Host header has to name the loopback interface: a page of another
site that resolves to 127.0.0.1 (DNS rebinding) has its own name there.
"""

import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie

from starlette.responses import PlainTextResponse, RedirectResponse, Response
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
        self._app, self._token, self._cookie = app, token, f"panpipe-{port}"
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
        if self._is_token(headers.get(HEADER, b"").decode("latin-1")):
            return None
        if scope["method"] == "GET" and self._is_token(_query_token(scope["query_string"].decode("latin-1"))):
            response = RedirectResponse("/", 303)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return response
        if scope["method"] == "GET" and self._is_token(_cookie(headers.get(b"cookie", b""), self._cookie)):
            return None
        return PlainTextResponse("first open the address that panpipe explore printed: it has a token\n", 403)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _query_token(query: str) -> str:
    return next((part[len("token=") :] for part in query.split("&") if part.startswith("token=")), "")


def _cookie(header: bytes, name: str) -> str:
    try:
        found = SimpleCookie(header.decode("latin-1")).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value
