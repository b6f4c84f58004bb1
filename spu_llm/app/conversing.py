"""Chats with a provider's model: one turn, or turns in a session that keeps its cache."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from models.chat import Message, cut, going_on
from spu_llm.api.client import Client, CompletionOptions
from spu_llm.api.completion import reads_of
from spu_llm.api.drafting import Drafting
from spu_llm.api.provider import Provider
from spu_llm.api.texts import chat_encoded, messages_of, renderer
from spu_llm.app import drafting
from spu_llm.app.options import provider_of
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import ask, say, tell
from spu_llm.app.screen import Screen, learned_lines
from spu_llm.core.errors import InputError, PeerError, WorkerError
from spu_llm.net.relay import Relay
from spu_llm.service.client import Server, run_as_client
from spu_llm.service.first_contact import KeptFormat
from spu_llm.systems.decoding.chat_request import ChatRequest
from spu_llm.systems.decoding.records import CHAT, ClientInputs

CONVERSATION_TOKENS = 4096  # at most; the model's context may be shorter


def run(options: argparse.Namespace) -> None:
    """Chat, or take one turn; answers to stdout, what was learned to stderr."""
    provider = provider_of(options)
    drafting.check(options)
    check_output(options.json)
    if options.json is not None and options.prompt is None:
        raise InputError("--json is of one turn; give --prompt TEXT")
    with closing(Screen("")) as screen:
        if options.prompt is not None:
            return _one_turn(options, provider, screen)
        kept = provider.text_format()
        renderer(kept)
        drafts = Drafting.of(
            kept.text.tokenizer, options.draft_length, options.draft_model, options.drafts
        )
        with provider.reached() as (server, pool):
            _Chat(options, provider, kept, drafts, screen).hold(server, pool)


def _one_turn(options: argparse.Namespace, provider: Provider, screen: Screen) -> None:
    asked = CompletionOptions(
        options.max_new_tokens,
        options.temperature,
        draft_length=options.draft_length,
        draft_model=options.draft_model,
        drafts=options.drafts,
        seed=options.seed,
    )
    result = Client(provider).chat(
        messages_of(options.system, options.prompt),
        asked,
        screen.on_event,
        on_wait=screen.say,
        started=options.started,
    )
    screen.finish()
    screen.end_text()
    screen.summary(result)
    write_json(options.json, result.to_json())


class _Chat:
    """A chat of this user's, over one session or several: where one ends, the next begins with all
    that was said.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        provider: Provider,
        kept: KeptFormat,
        drafts: Drafting,
        screen: Screen,
    ) -> None:
        self._options, self._provider, self._kept = options, provider, kept
        self._drafts, self._screen = drafts, screen
        self._render = renderer(kept)
        self._messages: list[Message] = []
        self._rendered = ""  # up to where the last answer begins
        self._tell: Callable[..., None] | None = None  # to the worker
        self._over = False  # the user says no more
        self._answering = False
        self._stopping = ""  # of the answer: "asked" by the user, "told" to the worker
        self._answers = 0  # of this session

    def hold(self, server: Server, pool: Path | None) -> None:
        """Take turns until the user has no other."""
        self._screen.pause()
        with _interrupts(self._interrupted):
            while self._has_turn():
                try:
                    self._session(server, pool)
                except PeerError as error:
                    # While nobody says anything, a provider may end a session, or start again.
                    if not self._answers:
                        raise
                    say(f"the session ended ({error}); beginning another one")
                finally:
                    self._answering = False

    def _has_turn(self) -> bool:
        """Return whether the user has said something that is not answered, or says so now."""
        if self._messages and self._messages[-1].role == "user":
            return True
        if self._over or (said := self._ask()) is None:
            return False
        system = self._options.system
        if self._messages:
            self._messages.append(Message("user", said))
        else:
            self._messages = messages_of(system, said)
        return True

    def _ask(self) -> str | None:
        """Return what the user says next; None: no more."""
        while True:
            try:
                said = ask("> ")
            except KeyboardInterrupt:
                say("Ctrl-D ends the chat")
                continue
            self._over = said is None
            if said is None or said.strip():
                return said

    def _session(self, server: Server, pool: Path | None) -> None:
        """Answer the last turn, and those after it while they go on from there."""
        self._answers = 0
        head, rest = cut(self._render, self._messages)
        self._rendered = head + rest
        prefix, prompt = chat_encoded(self._kept, head, rest)
        options = self._options
        request = ChatRequest(
            len(prompt),
            options.max_new_tokens,
            self._drafts.length,
            temperature=options.temperature,
            public_prefix=tuple(prefix),
            conversation_tokens=CONVERSATION_TOKENS,
        )
        request.check_options()
        models = [] if self._drafts.directory is None else [self._drafts.directory]
        self._answering, self._stopping = True, ""
        outcome, _ = run_as_client(
            server,
            CHAT,
            request,
            self._inputs(prompt),
            self._on_event,
            tokenizer=self._kept.text.tokenizer,
            text_format=self._kept.text.digest,
            reads=reads_of(self._kept, models),
            pool=pool,
            jobs=self._provider.jobs,
            hint_cache=self._provider.hint_cache,
            look=self._look,
            hears=self._hears,
        )
        tell(*learned_lines(outcome.result["learned"]))

    def _inputs(self, prompt: list[int]) -> ClientInputs:
        drafts = self._drafts
        return ClientInputs(
            prompt,
            str(self._kept.path),
            draft_seed=self._options.seed,
            draft_dir=None if drafts.directory is None else str(drafts.directory),
            ngrams=drafts.ngrams,
        )

    def _hears(self, tell_worker: Callable[..., None]) -> None:
        self._tell = tell_worker

    def _on_event(self, said: dict[str, Any], relay: Relay) -> None:
        self._screen.hear(said, relay)
        if said["event"] == "answer":
            self._answering = False
            self._answered(said)
            self._answering = True

    def _answered(self, event: dict[str, Any]) -> None:
        """Show that an answer has ended, and go on with what the user says next."""
        self._answers += 1
        self._screen.end_text()
        report, seconds = event["report"], event["seconds"]
        online = seconds["prefill"] + seconds["decode"]
        tell(
            f"[{len(event['token_ids'])} tokens in {online:.1f} s and {seconds['offline']:.1f} s "
            f"of preprocessing, ended by {report['finish_reason']}]"
        )
        self._messages.append(Message("assistant", event["text"]))
        said = self._ask()
        if said is None:
            return self._say(end=True)
        self._messages.append(Message("user", said))
        after = "".join(cut(self._render, self._messages))
        added = going_on(self._rendered, event["text"], after)
        if added is None:  # the template writes the past in another way: it is prefilled again
            return self._say(end=True)
        self._rendered, self._stopping = after, ""
        self._say(turn=self._kept.text.tokenizer.encode(added, goes_on=True))

    def _say(self, **said: Any) -> None:
        assert self._tell is not None
        try:
            self._tell(**said)
        except WorkerError:
            pass  # it has ended the session, since nobody said anything: its result says so

    def _interrupted(self) -> None:
        """End the answer on Ctrl-C, or, where it does not end at once, everything."""
        if not self._answering or self._tell is None or self._stopping:
            raise KeyboardInterrupt
        self._stopping = "asked"

    def _look(self) -> None:
        if self._stopping == "asked":
            self._stopping = "told"
            self._say(stop=True)


@contextmanager
def _interrupts(handle: Callable[[], None]) -> Iterator[None]:
    """Let `handle` have Ctrl-C meanwhile."""
    before = signal.signal(signal.SIGINT, lambda signum, frame: handle())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
