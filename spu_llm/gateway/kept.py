"""Conversations whose sessions stay open between requests, so that a turn's forward has its own
tokens alone. A request goes on with a conversation when it begins with all that was said there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from models.chat import Message
from spu_llm.api.client import CompletionOptions
from spu_llm.api.conversation import CONVERSATION_TOKENS, Ahead, Answer, Conversation, Later, Said
from spu_llm.api.events import Event, OnEvent, Stock
from spu_llm.api.provider import Provider
from spu_llm.core.errors import PeerError, StalledError
from spu_llm.gateway.asked import Asked
from spu_llm.service.supervisor import Look

CLOSE_S = 10.0  # for a session to end in order


def can_be_kept(asked: Asked) -> bool:
    """Tell whether a request is a conversation's turn, which has one answer and no texts to stop
    before it.
    """
    messages, options = asked.prompt, asked.options
    if isinstance(messages, str) or options.stop or asked.draws > 1:
        return False
    return messages[-1].role == "user"


@dataclass(frozen=True)
class Kind:
    """The sessions of one model, by its name in requests, with the same options."""

    model: str
    options: CompletionOptions


def kind_of(asked: Asked, ahead: Ahead | None) -> Kind:
    """Return the kind of a request's session. Opened ahead, it has room for any answer, and how
    long one may be the client alone knows.
    """
    options = asked.options
    if ahead is not None:
        options = replace(options, max_new_tokens=CONVERSATION_TOKENS)
    return Kind(asked.model, options)


class Kept:
    """A conversation in a thread of its own. One request at a time may have it. Opened ahead, it is
    there before its first turn, and any chat may begin it whose template begins so.
    """

    def __init__(
        self,
        provider: Provider,
        kind: Kind,
        before: list[Message],
        ahead: Ahead | None = None,
        may_make: Callable[[Kept], bool] = lambda kept: True,
    ) -> None:
        """Prepare a conversation that goes on after the messages `before`. InputError as of
        `Conversation`, whose `ahead` and `may_make` (asked about this one) it takes.
        """
        self.turns = 0  # that were answered
        self.stock: Stock | None = None  # what is there for the next turn
        self.kind = kind
        self._before, self._ahead = before, ahead
        self._conversation = Conversation(
            provider, kind.options, before=before, ahead=ahead, may_make=lambda: may_make(self)
        )
        self._turns: queue.Queue[list[Message] | None] = queue.Queue()
        self._ends: queue.Queue[Answer | Exception] = queue.Queue()
        self._heard: OnEvent = lambda event: None
        self._look: Look = lambda: None
        self._thread = threading.Thread(target=self._hold, name="conversation")
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Tell whether its session may still go on."""
        return self._thread.is_alive()

    @property
    def is_spare(self) -> bool:
        """Tell whether it was opened ahead and nobody has had it."""
        return self._ahead is not None and not self.turns

    @property
    def lacks_stock(self) -> bool:
        """Tell whether something that its next turn takes is still to be made, or may be."""
        stock = self.stock
        return self.is_open and (stock is None or stock.lacking > 0)

    def goes_on(self, asked: Asked) -> bool:
        """Tell whether a request is the next turn, or may be the first one. Programs may cut white
        space around texts. Takes the time of a template where it is a spare one.
        """
        if not can_be_kept(asked) or kind_of(asked, self._ahead) != self.kind:
            return False
        assert not isinstance(asked.prompt, str)
        if self.is_spare and not self._before:
            return self._conversation.begins(asked.prompt)
        return _shown(self._conversation.messages) == _shown(asked.prompt[:-1])

    def answer(self, asked: Asked, heard: OnEvent, look: Look) -> Answer:
        """Return the answer to the last turn of a chat. An error ends the conversation."""
        assert not isinstance(asked.prompt, str)
        self._heard, self._look = heard, look
        self._conversation.most = asked.options.max_new_tokens
        self._turns.put(asked.prompt)
        end = self._ends.get()
        # Whoever asked may go now: the session stays.
        self._look, self._heard = (lambda: None), (lambda event: None)
        if isinstance(end, Exception):
            self._thread.join()
            raise end
        self.turns += 1
        return end

    def stop(self) -> bool:
        """End the answer that is being written after its next step, and keep the conversation with
        the text so far. Return whether there is one that was not stopped before.
        """
        return self._conversation.stop()

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
            if isinstance(event, Stock):
                self.stock = event
            self._heard(event)

        try:
            self._conversation.hold(self._next, heard, lambda: self._look())
        except Exception as error:
            self._ends.put(error)
        else:
            self._ends.put(PeerError("the conversation has ended; ask again"))

    def _next(self, answer: Answer | None) -> Said:
        """Return what is said next. A session that was opened ahead gets on meanwhile."""
        if answer is not None:
            self.stock = None
            self._ends.put(answer)
        try:
            chat = self._turns.get(block=self._ahead is None)
        except queue.Empty:
            return Later.LATER
        if chat is None or (self.is_spare and not self._before):
            return chat
        return chat[-1].content


def _left() -> None:
    raise StalledError("the provider does not end the conversation")


def _shown(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content.strip()) for message in messages]
