"""The explorer's server: the page, the answers to its requests, and who may ask them.

The server listens on the loopback interface only. Every request needs the token of the printed address, which other
users of the machine do not have. That address leaves it in a cookie, with which the page opens at addresses without
the token: such a link can be shared, and kept. The page's own requests have it in a header: a page of another site
could send the cookie, and not the header. A request's Host header has to name the loopback interface: a page of another
site that resolves to 127.0.0.1 (DNS rebinding) has its own name there.
"""

import asyncio
import json
import secrets
import socket
import sys
import webbrowser
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeGuard
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.cluster.catalog.find import find_cluster
from ..core.errors import PanpipeError, RequestError
from ..core.numba_cache import compile_notice
from ..core.report.chart.topology import topology_svg
from . import uniform_answers
from .page import explorer_html
from .question import (
    END,
    REQUEST_LIMITS,
    FileQuestion,
    PlanQuestion,
    Question,
    UniformQuestion,
    parse_question,
    parse_request,
    progress,
)
from .results import File, Results, schedule_file
from .worker import Worker

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Explorer:
    """The server's state.

    Args:
        factory: a model whose code may run, because the command line named it.
    """

    def __init__(self, start: Question, results: Results, factory: str | None = None) -> None:
        self._start, self._results, self._factory = start, results, factory
        self._worker = Worker()

    def application(self, token: str, port: int) -> Starlette:
        """The ASGI application."""

        async def page(request: Request) -> Response:
            return HTMLResponse(explorer_html(self._start, self._results, self._factory, token), headers=HEADERS)

        routes = [
            Route("/", page),
            Route("/api/answer", self.answer, methods=["POST"]),
            Route("/api/idle", self.idle, methods=["POST"]),
            Route("/api/points", self.points, methods=["POST"]),
            Route("/api/topology", self.topology, methods=["POST"]),
            Route("/api/export", self.export, methods=["POST"]),
        ]

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await self._worker.close()

        access = Middleware(Access, token=token, port=port)
        return Starlette(
            routes=routes, middleware=[access], lifespan=lifespan, exception_handlers={PanpipeError: _refused}
        )

    async def answer(self, request: Request) -> Response:
        """Answer a question, as a stream of JSON lines: progress, and then the answer."""
        data = await _request_data(request)
        return _stream(self._answered(parse_question(data.get("question")), data))

    async def idle(self, request: Request) -> Response:
        """The idle time by cause of a schedule of uniform stages.

        The page requests it when its sliders have stopped: it takes longer than the schedule itself, and the answer to
        the next question should not wait for it.
        """
        question = parse_question((await _request_data(request)).get("question"))
        if not _takes_a_moment(question):
            raise RequestError("the answer to this question has its idle time already")
        scored, _ = await run_in_threadpool(uniform_answers.scored_of, question)
        return JSONResponse({"idle": await run_in_threadpool(uniform_answers.why_not_faster, scored)}, headers=HEADERS)

    async def points(self, request: Request) -> Response:
        """Time and memory of all schedules, a line for each."""
        data = await _request_data(request)
        question = parse_question(data.get("question"))
        if isinstance(question, FileQuestion):
            raise RequestError("a question of kind 'file' has no other schedules: ask for a plan or uniform stages")
        self._check_code(question, data)
        return _stream(self._worker.run("points", data["question"]))

    async def topology(self, request: Request) -> Response:
        """The picture of a cluster, by name or file."""
        name = str((await _request_data(request)).get("cluster"))
        cluster = await run_in_threadpool(find_cluster, name)
        svg = topology_svg(name, cluster)
        return JSONResponse({"svg": svg, "devices": len(cluster.devices)}, headers=HEADERS)

    async def export(self, request: Request) -> Response:
        """A file for the user, about the answer to a question."""
        data = await _request_data(request)
        question, what = parse_question(data.get("question")), str(data.get("what"))
        self._check_code(question, data)
        if isinstance(question, FileQuestion):
            file = await run_in_threadpool(self._results.file, question.number, what)
        elif _takes_a_moment(question):
            scored, _ = await run_in_threadpool(uniform_answers.scored_of, question)
            file = await run_in_threadpool(schedule_file, scored, what)
        else:
            file = await self._file(data["question"], what)
        headers = {**HEADERS, "Content-Disposition": f'attachment; filename="{file.name}"'}
        return Response(file.text, media_type=file.media_type, headers=headers)

    async def _file(self, question: dict[str, Any], what: str) -> File:
        async with aclosing(self._worker.run("file", question, what)) as lines:
            async for line in lines:
                if "file" in line:
                    return File(**line["file"])
                if "error" in line:
                    raise RequestError(line["error"])
        raise RequestError("the worker process wrote no file: try again")

    async def _answered(self, question: Question, data: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self._check_code(question, data)
        if isinstance(question, FileQuestion):
            yield {"answer": await run_in_threadpool(self._results.answer, question.number)}
        elif _takes_a_moment(question):
            async for line in _announced(question):
                yield line
        else:
            async for line in self._worker.run("answer", data["question"]):
                yield line

    def _check_code(self, question: Question, data: Mapping[str, Any]) -> None:
        """Refuse to call a user's function without consent.

        Raises:
            PanpipeError: neither the command line nor the user in the page has chosen to run it.
        """
        if isinstance(question, PlanQuestion) and question.runs_code:
            chosen = question.model in (self._factory, data.get("run_code"))
            if not chosen:
                raise RequestError(f"'{question.model}' is code of this machine: choose 'run its code' to call it")


def _takes_a_moment(question: Question) -> TypeGuard[UniformQuestion]:
    """Whether the server answers a question itself: the schedule of uniform stages is not searched."""
    return isinstance(question, UniformQuestion) and question.schedule != "auto"


async def _request_data(request: Request) -> dict[str, Any]:
    """The body of a request as plain data; no more than the limit is read.

    Raises:
        RequestError: it cannot be read.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > REQUEST_LIMITS.size:
            break
    return parse_request(body)


async def _announced(question: UniformQuestion) -> AsyncGenerator[dict[str, Any], None]:
    """Answer a question in a thread, with a line of progress before it if functions have to be compiled for it."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | None]()

    def work() -> dict[str, Any]:
        with compile_notice(lambda line: loop.call_soon_threadsafe(lines.put_nowait, line)):
            return uniform_answers.answer(question, *uniform_answers.scored_of(question))

    working = asyncio.ensure_future(run_in_threadpool(work))
    working.add_done_callback(lambda _: lines.put_nowait(None))
    while (line := await lines.get()) is not None:
        yield progress(line)
    yield {"answer": await working}


def _stream(lines: AsyncGenerator[dict[str, Any], None]) -> Response:
    async def texts() -> AsyncIterator[str]:
        try:
            async with aclosing(lines):  # a page that is closed cancels the job
                async for line in lines:
                    yield json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n"
        except PanpipeError as error:
            yield json.dumps({"error": str(error)}) + "\n"
        yield json.dumps(END) + "\n"

    return StreamingResponse(texts(), media_type="application/x-ndjson", headers=HEADERS)


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 422, headers=HEADERS)


HEADER = "x-panpipe-token"
HOSTS = ("127.0.0.1", "localhost")


class Access:
    """Middleware that refuses requests without the token, or with another Host header."""

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
        request = Request(scope)
        if request.headers.get("host") not in self._hosts:
            return PlainTextResponse("this server answers only at its own address, 127.0.0.1\n", 421)
        origin = request.headers.get("origin", "")
        if origin and origin.removeprefix("http://") not in self._hosts:
            return PlainTextResponse("requests from other sites are refused\n", 403)
        if self._is_token(request.headers.get(HEADER, "")):
            return None
        if request.method == "GET" and self._is_token(request.query_params.get("token", "")):
            response = RedirectResponse("/", 303)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return response
        if request.method == "GET" and self._is_token(request.cookies.get(self._cookie, "")):
            return None
        return PlainTextResponse("first open the address that panpipe explore printed: it has a token\n", 403)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


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
    token = secrets.token_urlsafe(24)
    with bind(port) as listener:
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


def bind(port: int | None) -> socket.socket:
    """A socket of the loopback interface; None is ``PORT``, or any free one.

    Raises:
        RequestError: the port is in use, or needs rights that this user does not have.
    """
    if port is None:
        try:
            return bind(PORT)
        except RequestError:
            return bind(0)
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
