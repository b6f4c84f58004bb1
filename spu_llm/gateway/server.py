"""The HTTP application: who may ask, which path is which protocol, and how answers go out."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from spu_llm.api.client import CompletionOptions
from spu_llm.api.texts import check_messages, check_texts
from spu_llm.core.errors import SpuLlmError
from spu_llm.gateway import anthropic, openai, page, privacy, responses
from spu_llm.gateway.answering import Answering, News, Piece, Said
from spu_llm.gateway.asked import Asked
from spu_llm.gateway.kept import Kind
from spu_llm.gateway.metrics import Metrics
from spu_llm.gateway.outcome import Outcome, headers_of
from spu_llm.gateway.refusals import Refused, refused
from spu_llm.gateway.running import Requests
from spu_llm.gateway.sent_events import comment

MOST_BYTES = 4 << 20  # of a request's body
QUIET_S = 5.0  # after which a stream says what is being done
_LOOK_S = 0.5  # how often it is seen whether whoever asked is still there
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
# Of pages: nothing from elsewhere, nothing in line, and nobody frames them.
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {**_HEADERS, "content-security-policy": _CSP, "referrer-policy": "no-referrer"}
_PAGE = {
    "/": ("chat.html", "text/html"),
    "/page/chat.css": ("chat.css", "text/css"),
    "/page/chat.js": ("chat.js", "text/javascript"),
}


class Reply(Protocol):
    """Writes an answer in one protocol: whole, or as the events of a stream."""

    def whole(self, outcome: Outcome) -> dict[str, Any]: ...

    def begin(self) -> Iterator[str]: ...

    def piece(self, piece: Piece) -> Iterator[str]: ...

    def end(self, outcome: Outcome) -> Iterator[str]: ...

    def failed(self, error: Refused) -> Iterator[str]: ...


@dataclass(frozen=True)
class Api:
    """A protocol's way of asking, of answering, and of refusing."""

    asked: Callable[[bytes, CompletionOptions], Asked]
    reply: Callable[[Asked], Reply]
    error: Callable[[Refused], dict[str, Any]]


_APIS = {
    "/v1/chat/completions": Api(openai.chat_asked, openai.Reply, openai.error_body),
    "/v1/completions": Api(openai.completion_asked, openai.Reply, openai.error_body),
    "/v1/responses": Api(responses.response_asked, responses.Reply, openai.error_body),
    "/v1/messages": Api(anthropic.message_asked, anthropic.Reply, anthropic.error_body),
}


@dataclass(frozen=True)
class Gateway:
    """An application over sessions with one provider. `first`: of the chat that is likely to come
    first. `token`: that every request must bear. `hosts`: names by which it may be called; None:
    any.
    """

    requests: Requests
    options: CompletionOptions  # where a request says nothing else
    first: Kind
    token: str | None = None
    hosts: frozenset[str] | None = None
    _started: int = field(default_factory=lambda: int(time.time()))
    _metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_metrics", Metrics(self.requests))

    def application(self) -> Starlette:
        """Return the application."""
        routes = [Route(path, self._answered(api), methods=["POST"]) for path, api in _APIS.items()]
        routes += [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/requests/{id}/stop", self._stopped, methods=["POST"]),
            Route("/health", self._health),
            Route("/privacy", self._privacy),
            Route("/metrics", self._counts),
        ]
        routes += [Route(path, self._part(*part)) for path, part in _PAGE.items()]
        handlers = {Refused: _refusal, HTTPException: _no_path}
        application = Starlette(
            routes=routes,
            exception_handlers=handlers,  # type: ignore[arg-type]
            lifespan=self._lifespan,
        )
        # They would name the host that a request bears.
        application.router.redirect_slashes = False
        return application

    @asynccontextmanager
    async def _lifespan(self, application: Starlette) -> AsyncIterator[None]:
        self.requests.open(self.first)
        yield
        await self.requests.close()

    # ---- who may ask

    def _check(self, request: Request) -> None:
        """Refuse who may not ask. A page in a browser cannot: its requests bear its own host, or
        another type of content.
        """
        self._check_host(request)
        self._check_token(request)

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host", "").rpartition("@")[2]
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self.hosts is not None and name.lower() not in self.hosts:
            raise Refused(403, f"this gateway is called {', '.join(sorted(self.hosts))}")

    def _check_token(self, request: Request) -> None:
        if self.token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            raise Refused(401, "give the gateway's token as the API key")

    def _check_model(self, name: str) -> None:
        if name not in self._names:
            there = ", ".join(map(repr, self._names))
            raise Refused(404, f"there is no model {name[:80]!r}, only {there}", "model")

    @property
    def _names(self) -> list[str]:
        """Return the models' names, the first one first."""
        return list(self.requests.clients)

    # ---- answers

    def _answered(self, api: Api) -> Callable[[Request], Any]:
        async def answered(request: Request) -> Response:
            path = request.url.path
            try:
                self._check(request)
                asked = api.asked(await _body(request), self.options)
                self._check_model(asked.model)
                _check_texts(asked)
                reply = api.reply(asked)
                if asked.stream:
                    return _Stream(self.requests.begin(asked), reply, path, self._metrics)
                outcome = await self._whole(request, asked)
                self._metrics.ended(path, 200, outcome)
                return JSONResponse(reply.whole(outcome), headers=_HEADERS | headers_of(outcome))
            except SpuLlmError as failure:
                error = refused(failure)
                self._metrics.ended(path, error.status)
                return JSONResponse(api.error(error), error.status, headers=_retry(error))

        return answered

    async def _whole(self, request: Request, asked: Asked) -> Outcome:
        """Return the completion; end the session when whoever asked has gone."""
        answering = self.requests.begin(asked)
        try:
            while not await request.is_disconnected():
                match await _next(answering, _LOOK_S):
                    case Outcome() as outcome:
                        return outcome
                    case Refused() as error:
                        raise error
            raise Refused(499, "whoever asked has gone")
        finally:
            answering.cancel()

    async def _stopped(self, request: Request) -> Response:
        """Have a stream's answer end where it is, so that its chat can go on from there."""
        self._check(request)
        await _body(request)
        if not self.requests.stop(request.path_params["id"]):
            raise Refused(404, "no answer that can be stopped is written for such a request")
        return JSONResponse({"stopped": True}, headers=_HEADERS)

    # ---- what else can be asked

    async def _models(self, request: Request) -> Response:
        self._check(request)
        return JSONResponse(openai.models_body(self._names, self._started))

    async def _model(self, request: Request) -> Response:
        self._check(request)
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(openai.model_body(name, self._started))

    async def _health(self, request: Request) -> Response:
        """Answer that it runs; who may ask also gets counts."""
        self._check_host(request)
        try:
            self._check_token(request)
        except Refused:
            return JSONResponse({"status": "ok"})
        ahead = self.requests.ahead
        ready = [
            {
                "turns": turns,
                "prompt_tokens": 0 if stock.steps is None or ahead is None else ahead.turn_tokens,
                "answer_tokens_at_least": 0 if stock.steps is None else 1 + stock.steps,
                "batches_lacking": stock.lacking,
            }
            for turns, stock in self.requests.stocks
        ]
        return JSONResponse(
            {
                "status": "ok",
                "models": self._names,
                "requests": self.requests.count,
                "conversations": self.requests.conversations,
                "ready": ready,
            },
            headers=_HEADERS,
        )

    async def _privacy(self, request: Request) -> Response:
        """Answer with what each party learned in the last session that has ended, to a browser as a
        page.
        """
        self._check(request)
        learned = self.requests.learned
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(privacy.page(learned), headers=_PAGE_HEADERS)
        return JSONResponse({"learned": learned}, headers=_HEADERS)

    async def _counts(self, request: Request) -> Response:
        """Answer with counts, for Prometheus."""
        self._check(request)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    def _part(self, name: str, kind: str) -> Callable[[Request], Any]:
        """Return what answers with a part of the page, which holds nothing of anybody's."""

        async def part(request: Request) -> Response:
            self._check_host(request)
            content = files(page).joinpath(name).read_bytes()
            return Response(content, media_type=kind, headers=_PAGE_HEADERS)

        return part


class _Stream(StreamingResponse):
    """A session's events as they come; the session ends with the connection."""

    def __init__(self, answering: Answering, reply: Reply, path: str, metrics: Metrics) -> None:
        self._answering, self._reply = answering, reply
        self._path, self._metrics = path, metrics
        self._began: float | None = time.monotonic()  # None: there was text
        headers = {**_HEADERS, "x-spu-llm-request": answering.id}
        super().__init__(self._events(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answering.cancel()

    async def _events(self) -> AsyncIterator[str]:
        """Yield events; where none comes for a while, a comment with what is done."""
        news, reply = "waiting", self._reply
        for event in reply.begin():
            yield event
        while True:
            one = await _next(self._answering, QUIET_S)
            events: Iterable[str] = ()
            match one:
                case None:
                    events = [comment(news)]
                case News():
                    news = one.words
                case Piece():
                    events = reply.piece(one)
                    if one.text and self._began is not None:
                        self._metrics.first(time.monotonic() - self._began)
                        self._began = None
                case Outcome():
                    events = reply.end(one)
                    self._metrics.ended(self._path, 200, one)
                case Refused():
                    events = reply.failed(one)
                    self._metrics.ended(self._path, one.status)
            for event in events:
                yield event
            if isinstance(one, Outcome | Refused):
                return


async def _next(answering: Answering, seconds: float) -> Said | None:
    """Return what a session says next; None where that is nothing for so long."""
    try:
        return await asyncio.wait_for(answering.said.get(), seconds)
    except asyncio.TimeoutError:
        return None


def _check_texts(asked: Asked) -> None:
    """Raise InputError for texts that no provider could be asked with."""
    if isinstance(asked.prompt, str):
        check_texts("", asked.prompt)
    else:
        check_messages(asked.prompt)


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, "send the request as application/json")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise Refused(413, f"a request has {MOST_BYTES >> 20} MiB at most")
    except ClientDisconnect:
        raise Refused(499, "whoever asked has gone") from None
    return bytes(body)


def _retry(error: Refused) -> dict[str, str]:
    return {**_HEADERS, "retry-after": "5"} if error.status in (429, 503) else dict(_HEADERS)


async def _refusal(request: Request, error: Refused) -> Response:
    return JSONResponse(openai.error_body(error), error.status, headers=_retry(error))


async def _no_path(request: Request, error: HTTPException) -> Response:
    refusal = Refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(openai.error_body(refusal), error.status_code, headers=error.headers)
