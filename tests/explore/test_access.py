"""Requests that the explorer refuses: of other hosts, other sites, and without the token."""

import asyncio

import pytest
from panpipe.explore.access import Access, new_token


def status(headers, query=b"", port=8123, kind="http", method="GET"):
    """The status of a request, 200 for one that reaches the application."""
    sent = []

    async def app(scope, receive, send):
        sent.append(200)

    async def send(message):
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    scope = {"type": kind, "headers": headers, "query_string": query, "method": method, "path": "/"}
    asyncio.run(Access(app, "secret", port)(scope, None, send))
    [found] = sent
    return found


HOST, TOKEN = (b"host", b"127.0.0.1:8123"), (b"x-panpipe-token", b"secret")


def test_request_with_the_token_reaches_the_application():
    assert status([HOST, TOKEN]) == 200
    assert status([(b"host", b"localhost:8123"), TOKEN, (b"origin", b"http://localhost:8123")]) == 200
    assert status([(b"host", b"localhost"), TOKEN], port=80) == 200
    assert status([], kind="lifespan") == 200


def test_address_with_the_token_leads_to_one_without_it_that_a_cookie_opens():
    assert status([HOST], b"a=1&token=secret") == 303
    cookie = (b"cookie", b"other=1; panpipe-8123=secret")
    assert status([HOST, cookie]) == 200
    assert status([HOST, cookie], method="POST") == 403  # a page of another site could send it
    assert status([HOST], b"token=secret", method="POST") == 403
    assert status([HOST, (b"cookie", b"panpipe-8123=other")]) == 403


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([HOST], 403),
        ([HOST, (b"x-panpipe-token", b"secre")], 403),
        ([TOKEN], 421),
        ([(b"host", b"evil.example"), TOKEN], 421),
        ([(b"host", b"127.0.0.1"), TOKEN], 421),
        ([HOST, TOKEN, (b"origin", b"https://evil.example")], 403),
        ([HOST, TOKEN, (b"origin", b"https://127.0.0.1:8123")], 403),
    ],
)
def test_other_requests_are_refused(headers, expected):
    assert status(headers) == expected


def test_every_token_is_new():
    assert len({new_token() for _ in range(3)}) == 3
    assert len(new_token()) >= 32
