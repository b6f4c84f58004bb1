"""Chats on the terminal: one turn, or turns until the user has no other."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from spu_llm.api.client import Client, CompletionOptions
from spu_llm.api.conversation import Answer, Conversation
from spu_llm.api.events import Event, Learned
from spu_llm.api.provider import Provider
from spu_llm.api.texts import messages_of
from spu_llm.app import drafting
from spu_llm.app.options import provider_of
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import ask, say, tell
from spu_llm.app.screen import Screen, learned_lines
from spu_llm.core.errors import InputError


def run(options: argparse.Namespace) -> None:
    """Chat, or take one turn; answers to stdout, what was learned to stderr."""
    provider = provider_of(options)
    drafting.check(options)
    check_output(options.json)
    if options.json is not None and options.prompt is None:
        raise InputError("--json is of one turn; give --prompt TEXT")
    asked = CompletionOptions(
        options.max_new_tokens,
        options.temperature,
        draft_length=options.draft_length,
        draft_model=options.draft_model,
        drafts=options.drafts,
        seed=options.seed,
    )
    with closing(Screen("")) as screen:
        if options.prompt is None:
            *before, _ = messages_of(options.system, ".")  # the first turn comes later
            hold(Conversation(provider, asked, before=before), screen)
        else:
            _one_turn(options, provider, asked, screen)


def _one_turn(
    options: argparse.Namespace, provider: Provider, asked: CompletionOptions, screen: Screen
) -> None:
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


def hold(conversation: Conversation, screen: Screen) -> None:
    """Hold a conversation on the terminal: Ctrl-C ends an answer, a second one everything."""

    def next_turn(answer: Answer | None) -> str | None:
        if answer is None:
            screen.pause()
        else:
            screen.end_text()
            seconds = answer.seconds
            online = seconds.prefill + seconds.decode
            tell(
                f"[{len(answer.token_ids)} tokens in {online:.1f} s and {seconds.offline:.1f} s "
                f"of preprocessing, ended by {answer.finish_reason}]"
            )
        return _ask()

    def on_event(event: Event) -> None:
        screen.on_event(event)
        if isinstance(event, Learned):
            tell(*learned_lines(event.learned))

    def interrupted() -> None:
        if not conversation.stop():
            raise KeyboardInterrupt

    with _interrupts(interrupted):
        conversation.hold(next_turn, on_event)


def _ask() -> str | None:
    """Return what the user says next; None: no more."""
    while True:
        try:
            said = ask("> ")
        except KeyboardInterrupt:
            say("Ctrl-D ends the chat")
            continue
        if said is None or said.strip():
            return said


@contextmanager
def _interrupts(handle: Callable[[], None]) -> Iterator[None]:
    """Let `handle` have Ctrl-C meanwhile."""
    before = signal.signal(signal.SIGINT, lambda signum, frame: handle())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
