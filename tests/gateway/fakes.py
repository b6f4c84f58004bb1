"""A gateway before a client of the provider that is made up, and what asks it."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import anthropic
import openai
import uvicorn

from models.chat import Message
from spu_llm.api.client import CompletionOptions
from spu_llm.api.completion import BothWays, Completion, Prefetched, Seconds
from spu_llm.api.conversation import CONVERSATION_TOKENS, Ahead, Answer, Later
from spu_llm.api.events import Learned, Making, OnEvent, Stock, Text
from spu_llm.core.errors import BusyError, PeerError, SpuLlmError
from spu_llm.core.machine import machine
from spu_llm.gateway.kept import Kind
from spu_llm.gateway.running import Requests
from spu_llm.gateway.server import Gateway

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PIECES = ["Good", " day", "é"]
LOCAL = frozenset({"127.0.0.1"})


READY = Ahead(32, 16)


def completion(text: str, reason: str = "eos") -> Completion:
    return Completion(
        text=text,
        token_ids=[1, 2, 3],
        finish_reason=reason,
        steps=2,
        drafted=4,
        accepted=1,
        seconds=Seconds(3.0, 1.0, 2.0),
        made_beside=Prefetched(0, 0.0),
        first_token_seconds=4.0,
        elapsed_seconds=6.0,
        bytes={},
        messages={"offline": 10, "online": 20},
        wire_bytes=BothWays(100, 200),
        per_step=[],
        learned={"client": ["tokens"], "provider": ["lengths"]},
        machine=machine(),
        config={"request.prompt_tokens": 5, "request.public_prefix": "1,2"},
    )


class Fake:
    """In place of `spu_llm.Client`: writes PIECES, or what a test puts into `does`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, CompletionOptions]] = []
        self.does: Callable[[OnEvent, Callable[[], None]], Completion] = self.writes
        self.ended: list[str] = []
        self.provider = SimpleNamespace(pool=None)

    def writes(self, on_event: OnEvent, look: Callable[[], None]) -> Completion:
        for piece in PIECES:
            look()
            on_event(Text(piece))
        return completion("".join(PIECES))

    def waits(self, on_event: OnEvent, look: Callable[[], None]) -> Completion:
        """Write one piece, and go on until it is to end."""
        on_event(Text(PIECES[0]))
        on_event(Making(3, 9))
        while True:
            look()
            time.sleep(0.02)

    def complete(
        self, prompt: Any, options: CompletionOptions, on_event: OnEvent, *, look: Any
    ) -> Completion:
        self.asked.append((prompt, options))
        try:
            made = self.does(on_event, look)
            self.ended.append("well")
            return made
        except SpuLlmError as error:
            self.ended.append(str(error))
            raise

    chat = complete


@contextmanager
def served(
    client: Fake,
    *,
    token: str | None = None,
    hosts: frozenset[str] | None = LOCAL,
    at_once: int = 1,
    keep: int = 0,
    ahead: Ahead | None = None,
    others: Mapping[str, Fake] = MappingProxyType({}),
) -> Iterator[int]:
    """Yield the port of a gateway that asks `client` for the model "private", and `others`."""
    clients = {"private": client, **others}
    requests = Requests(clients, at_once, keep, ahead)  # type: ignore[arg-type]
    first = Kind("private", CompletionOptions(max_new_tokens=CONVERSATION_TOKENS))
    gateway = Gateway(requests, CompletionOptions(), first, token, hosts)
    run = uvicorn.Server(
        uvicorn.Config(gateway.application(), log_config=None, timeout_graceful_shutdown=1)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            run.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def of_openai(port: int, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


def of_anthropic(port: int, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0)


def asked(
    port: int, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    answer = connection.getresponse()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


class Talk:
    """In place of `spu_llm.Conversation`: answers turn after turn, by their number."""

    made: list[Talk] = []
    most_open = 9  # places at the provider
    fails = ends = False
    lacking = 5  # batches for the next turn
    gone = 0  # how many of those made, the first ones, have no provider

    def __init__(
        self,
        provider: Any,
        options: CompletionOptions,
        *,
        before: list[Message],
        ahead: Ahead | None,
        may_make: Callable[[], bool],
    ) -> None:
        self.messages, self.may_make, self.options = list(before), may_make, options
        self.provider = provider
        self.most: int | None = None
        self.stops = False
        self.before, self.turns, self.is_over = len(before), 0, False
        self.made.append(self)

    def hold(self, next_turn: Any, on_event: OnEvent, look: Callable[[], None]) -> None:
        def said_next(answer: Answer | None = None) -> Any:
            while (said := next_turn(answer)) is Later.LATER:
                answer = None
                on_event(Stock(2, self.lacking))
                look()
                if self.ends:
                    raise PeerError("it ended")
                time.sleep(0.02)
            return said

        try:
            if self.fails:
                raise PeerError("nobody answers")
            said = said_next()
            if sum(not talk.is_over for talk in self.made) > self.most_open:
                raise BusyError("no place")
            while said is not None:
                if not isinstance(said, str):
                    *self.messages, said = *said[:-1], said[-1].content
                self.messages.append(Message("user", said))
                if said == "fail" or self.made.index(self) < self.gone:
                    raise PeerError("it went away")
                while said == "wait" and not self.stops:
                    look()
                    time.sleep(0.02)
                self.turns += 1
                on_event(Text(f"answer {self.turns}"))
                answer = f" answer {self.turns} "
                self.messages.append(Message("assistant", answer))
                end, self.stops = "interrupted" if self.stops else "eos", False
                said = said_next(self.answer(answer, end))
                look()  # as a session does after each event
            on_event(Learned({"client": [f"{self.turns} turns"], "provider": []}))
        finally:
            self.is_over = True
            self.may_make = lambda: False  # whose owner can go

    def stop(self) -> bool:
        self.stops = True
        return True

    def answer(self, text: str, end: str) -> Answer:
        both = {"offline": BothWays(1, 2), "online": BothWays(3, 4)}
        counts = {"offline": 5, "online": 6}
        return Answer(text, [1, 2], end, Seconds(1, 2, 3), 9, self.turns - 1, both, counts, 1, 4, 1)

    def begins(self, chat: list[Message]) -> bool:
        return chat[0].role == "user"


def said(*texts: str) -> list[Any]:
    """Return a chat, whose turns are the user's and the model's in turn."""
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def ready_in(port: int) -> list[Any]:
    """Return what is there for next turns."""
    ready: list[Any] = json.loads(asked(port, "GET", "/health")[2])["ready"]
    return ready
