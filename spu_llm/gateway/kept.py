"""Conversations whose sessions stay open between requests, so that a turn's forward has its own
tokens alone. A request goes on with a conversation when it begins with all that was said there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from models.chat import Message
from spu_llm.api.client import CompletionOptions
from spu_llm.api.conversation import Answer, Conversation
from spu_llm.api.events import Event, OnEvent
from spu_llm.api.provider import Provider
from spu_llm.core.errors import StalledError
from spu_llm.gateway.asked import Asked
from spu_llm.service.supervisor import Look

CLOSE_S = 10.0  # for a session to end in order


def can_be_kept(asked: Asked) -> bool:
    """Tell whether a request is a conversation's turn. Texts to stop before are not of a
    conversation.
    """
    messages = asked.prompt
    return not isinstance(messages, str) and messages[-1].role == "user" and not asked.options.stop


class Kept:
    """A conversation in a thread of its own. One request at a time may have it."""

    def __init__(self, provider: Provider, options: CompletionOptions, before: list[Message]):
        """Prepare a conversation that goes on after the messages `before`. InputError as of
        `Conversation`.
        """
        self.turns = 0  # that were answered
        self._options = options
        self._conversation = Conversation(provider, options, before=before)
        self._turns: queue.Queue[str | None] = queue.Queue()
        self._ends: queue.Queue[Answer | Exception] = queue.Queue()
        self._heard: OnEvent = lambda event: None
        self._look: Look = lambda: None
        self._thread = threading.Thread(target=self._hold, name="conversation")
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Tell whether its session may still go on."""
        return self._thread.is_alive()

    def goes_on(self, asked: Asked) -> bool:
        """Tell whether a request is the next turn. Programs may cut white space around texts."""
        return (
            can_be_kept(asked)
            and asked.options == self._options
            and _shown(self._conversation.messages) == _shown(asked.prompt[:-1])  # type: ignore[arg-type]
        )

    def answer(self, turn: str, heard: OnEvent, look: Look) -> Answer:
        """Return the answer to a turn. An error ends the conversation."""
        self._heard, self._look = heard, look
        self._turns.put(turn)
        end = self._ends.get()
        # Whoever asked may go now: the session stays.
        self._look = lambda: None
        if isinstance(end, Exception):
            self._thread.join()
            raise end
        self.turns += 1
        return end

    def close(self, heard: OnEvent = lambda event: None) -> None:
        """End the conversation, and wait until its processes have ended. `heard` gets what was
        learned. A provider that does not end it in time is left.
        """
        self._heard = heard
        self.abandon()
        self._thread.join(CLOSE_S)
        self._look = _left
        self._thread.join()

    def abandon(self) -> None:
        """End the conversation when it is idle, without waiting for that."""
        self._turns.put(None)

    def _hold(self) -> None:
        def heard(event: Event) -> None:
            self._heard(event)

        try:
            self._conversation.hold(self._next, heard, lambda: self._look())
        except Exception as error:
            self._ends.put(error)

    def _next(self, answer: Answer | None) -> str | None:
        if answer is not None:
            self._ends.put(answer)
        return self._turns.get()


def _left() -> None:
    raise StalledError("the provider does not end the conversation")


def _shown(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content.strip()) for message in messages]
