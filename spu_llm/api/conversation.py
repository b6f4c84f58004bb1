"""A conversation with a provider's model: turns in a session whose cache stays, and where one
session ends, another one that begins with all that was said.

A conversation may be opened ahead of its first turn (`Ahead`): then its session is there, and what
a turn and its answer take is made while nobody says anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any

from models.chat import Message, cut, going_on
from spu_llm.api.client import CompletionOptions
from spu_llm.api.completion import PHASES, BothWays, Seconds, messages, payload, reads_of
from spu_llm.api.drafting import Drafting
from spu_llm.api.events import Learned, Note, OnEvent, Text, event_of
from spu_llm.api.preparation import likely_steps
from spu_llm.api.provider import Provider
from spu_llm.api.texts import chat_encoded, check_messages, renderer
from spu_llm.core.errors import InputError, PeerError, WorkerError
from spu_llm.net.relay import Relay
from spu_llm.service.client import Server, run_as_client
from spu_llm.service.supervisor import Look
from spu_llm.systems.decoding.chat_request import MOST_AHEAD_STEPS, ChatRequest
from spu_llm.systems.decoding.records import CHAT, ClientInputs

CONVERSATION_TOKENS = 4096  # at most; the model's context may be shorter
_OPTIONS = ("max_new_tokens", "temperature", "draft_length", "draft_model", "drafts", "seed")


@dataclass(frozen=True)
class Answer:
    """Answer of the model to a turn, and its cost."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "eos", "length", "context" or "interrupted"
    seconds: Seconds
    prompt_tokens: int  # of the conversation before the answer
    cached_tokens: int  # of these: whose rows were in the session's cache already
    bytes: dict[str, BothWays]  # since the answer before: "offline" and "online", of the payload
    messages: dict[str, int]  # "offline" and "online", of both parties
    steps: int  # secure steps after the turn's forward
    drafted: int
    accepted: int


class Later(Enum):
    """There is no next turn yet: it is asked for again within a second."""

    LATER = auto()


@dataclass(frozen=True)
class Ahead:
    """The work done before a turn comes: correlated randomness for a turn of so many tokens, and
    for an answer to it. Longer turns take a multiple of these tokens, and what lacks is made as
    they go.
    """

    turn_tokens: int = 32
    answer_tokens: int = 32


# What the user says next; before the first turn of a conversation that was opened ahead, also a
# whole chat that ends with one. None: no more.
Said = str | Sequence[Message] | Later | None
NextTurn = Callable[[Answer | None], Said]


class Conversation:
    """A conversation by the model's own template. The provider learns when turns come, how many
    tokens each has (opened ahead: rounded up), the number of each answer's steps, and in the clear
    what the template writes before the first words.
    """

    def __init__(
        self,
        provider: Provider,
        options: CompletionOptions = CompletionOptions(max_new_tokens=256),
        *,
        before: Sequence[Message] = (),
        ahead: Ahead | None = None,
        may_make: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepare a conversation; nothing is computed yet.

        options: of them a conversation has the limit of an answer, temperature, drafts and their
        seed. before: what comes before the first turn, on shares: what a system says, earlier turns
        and answers. ahead: open it before its first turn; may_make: asked now and then whether what
        turns take may be made now. InputError for other options, and for a
        model that has no chats.
        """
        for option in fields(options):
            if option.name not in _OPTIONS and getattr(options, option.name) != option.default:
                raise InputError(f"a conversation has no --{option.name.replace('_', '-')}")
        self._provider, self._options = provider, options
        self._ahead, self._may_make = ahead, may_make
        self._text = provider.text_format()
        self._render = renderer(self._text)
        self._drafts = Drafting.of(
            self._text.text.tokenizer, options.draft_length, options.draft_model, options.drafts
        )
        self.messages: list[Message] = list(before)
        self.most: int | None = None  # tokens of answers from now on, within the options' limit
        self._next_turn: NextTurn = lambda answer: None
        self._cut: tuple[list[Message], tuple[str, str]] = [], ("", "")  # a chat, and its parts
        self._head = "" if ahead is None else self._head_ahead()  # of the session
        self._rendered = ""  # up to where the last answer begins; "" before the first turn
        self._cached = self._rows = 0  # of the session's tokens: before the last turn, and with it
        self._tell: Callable[..., None] | None = None  # to the worker
        self._look_of_caller: Look = lambda: None
        self._answering = False
        self._waiting = False  # for a turn that was not there yet
        self._stopping = ""  # of the answer: "asked" for, "told" to the worker
        self._answers = 0  # of this session
        self._is_open = False  # whether this session hears turns
        self._makes = True  # whether the worker was told so
        self._has_text = False  # of the answer that is being written
        self._again = False  # whether a session ended before that answer

    def hold(
        self, next_turn: NextTurn, on_event: OnEvent = lambda event: None, look: Look = lambda: None
    ) -> None:
        """Take turns until `next_turn` returns None: it gets each answer, None where there is none
        since it was asked last, and returns what the user says next. on_event: gets each event in
        the calling thread; `Learned` ends a session. look: called now and then while an answer is
        written, may end the conversation by an error. SpuLlmError, of the kind that says who
        failed.
        """
        self._next_turn, self._look_of_caller = next_turn, look
        if self._ahead is None:
            first = next_turn(None)
            if first is None:
                return
            self._add(first)
        # Of a provider here, which serves a session.
        seed = self._options.seed if self._provider.server is None else None
        while True:
            try:
                with self._provider.reached(seed) as (server, pool):
                    self._session(server, pool, seed, on_event)
            except PeerError as error:
                # While nobody says anything, a provider may end a session, or start again.
                begun = self._answers or (self._is_open and not self._again)
                if not begun or self._has_text or self._waiting:
                    raise
                self._again = True
                words = f"the session ended ({error}); beginning another one"
                on_event(Note(words))
            finally:
                self._answering = self._is_open = False
            if not self._is_asked:
                return

    def stop(self) -> bool:
        """End the answer that is being written, from any thread or a signal's handler. Return
        whether there is one that has not been stopped before.
        """
        if not self._answering or self._tell is None or self._stopping:
            return False
        self._stopping = "asked"
        return True

    def begins(self, messages: Sequence[Message]) -> bool:
        """Tell whether a conversation that was opened ahead may begin with a chat: what the
        template writes before its first words is what the session has begun with.
        """
        return self._parts(messages)[0] == self._head

    def _head_ahead(self) -> str:
        """Return what the template writes before the first words of the chat, whatever comes."""
        chat = self.messages if self._is_asked else [*self.messages, Message("user", "words")]
        return self._parts(chat)[0]

    @property
    def _is_asked(self) -> bool:
        """Return whether a turn waits for its answer."""
        return bool(self.messages) and self.messages[-1].role == "user"

    def _parts(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Return a chat as its template writes it: the public head, and the rest."""
        chat, last = list(messages), self._cut  # several threads may ask
        if last[0] != chat:
            last = self._cut = chat, cut(self._render, chat)
        return last[1]

    def _add(self, said: str | Sequence[Message] | Later) -> None:
        """Add what the user says to the chat."""
        assert not isinstance(said, Later)
        if isinstance(said, str):
            self.messages.append(Message("user", said))
        else:
            self.messages[:] = said
        check_messages(self.messages)

    def _session(
        self, server: Server, pool: Any, sampling_seed: int | None, on_event: OnEvent
    ) -> None:
        """Answer the last turn, and those after it while they go on from there."""
        self._answers, self._has_text, self._makes = 0, False, True
        prefix, prompt = self._begin()
        drafts, provider, ahead = self._drafts, self._provider, self._ahead
        request = ChatRequest(
            len(prompt),
            self._options.max_new_tokens,
            drafts.length,
            temperature=self._options.temperature,
            public_prefix=tuple(prefix),
            conversation_tokens=CONVERSATION_TOKENS,
            turn_rows=0 if ahead is None else ahead.turn_tokens,
            ahead_steps=0 if ahead is None else self._steps(ahead),
        )
        request.check_options()
        inputs = ClientInputs(
            prompt,
            str(self._text.path),
            draft_seed=self._options.seed,
            sampling_seed=sampling_seed,
            draft_dir=None if drafts.directory is None else str(drafts.directory),
            ngrams=drafts.ngrams,
        )

        def heard(said: dict[str, Any], relay: Relay) -> None:
            if (event := event_of(said, relay)) is not None:
                self._has_text |= isinstance(event, Text)
                on_event(event)
            if said["event"] == "open":
                self._opened()
            if said["event"] == "answer":
                self._answering = False
                self._answered(_answer(said, self._rows, self._cached))

        self._answering, self._stopping = self._is_asked, ""
        outcome, _ = run_as_client(
            server,
            CHAT,
            request,
            inputs,
            heard,
            tokenizer=self._text.text.tokenizer,
            text_format=self._text.text.digest,
            reads=reads_of(self._text, [] if drafts.directory is None else [drafts.directory]),
            pool=pool,
            jobs=provider.jobs,
            hint_cache=provider.hint_cache,
            look=self._look,
            hears=self._hears,
        )
        if ahead is not None and self._rendered and self._is_asked and not self._answers:
            raise InputError(
                f"the chat has {self._rows} tokens, more than the model can read and answer in a "
                "conversation; shorten it"
            )
        on_event(Learned(outcome.result["learned"]))

    def _steps(self, ahead: Ahead) -> int:
        steps = likely_steps(ahead.answer_tokens, self._drafts.length)
        return max(0, min(steps, MOST_AHEAD_STEPS))

    def _begin(self) -> tuple[list[int], list[int]]:
        """Begin a session: return the tokens of its public head, and of what the session begins
        with on shares, nothing where that comes later.
        """
        self._rendered, self._cached, self._rows = "", 0, 0
        if self._ahead is not None:
            self._head = self._head_ahead()
            return chat_encoded(self._text, self._head, "")
        self._head, rest = self._parts(self.messages)
        self._rendered = self._head + rest
        prefix, prompt = chat_encoded(self._text, self._head, rest)
        self._rows = len(prefix) + len(prompt)
        return prefix, prompt

    def _opened(self) -> None:
        """Say the first turn to a session that hears turns, once it is there."""
        self._is_open = True
        if self._is_asked:
            self._say_turn()
        else:
            self._hear(self._next_turn(None))

    def _answered(self, answer: Answer) -> None:
        """Go on with what the user says after an answer."""
        self._answers, self._again = self._answers + 1, False
        self.messages.append(Message("assistant", answer.text))
        # The row of the answer's last token is computed with the next turn.
        self._rows += len(answer.token_ids)
        self._cached = self._rows - 1
        self._hear(self._next_turn(answer))

    def _hear(self, said: Said) -> None:
        """Go on with what the user says, if anything."""
        self._waiting = isinstance(said, Later)
        if said is None:
            self._say(end=True)
        elif not self._waiting:
            self._add(said)
            self._say_turn()

    def _say_turn(self) -> None:
        """Say the last turn to the session; end it where the turn does not go on from what it
        has.
        """
        head, rest = self._parts(self.messages)
        if not self._rendered:
            prefix, turn = chat_encoded(self._text, head, rest)
            self._rows = self._cached = len(prefix)
            goes_on = head == self._head
        else:
            added = going_on(self._rendered, self.messages[-2].content, head + rest)
            turn = self._text.text.tokenizer.encode(added or "", goes_on=True)
            goes_on = added is not None
        if not goes_on:  # the template writes the past in another way: it is prefilled again
            return self._say(end=True)
        self._rendered, self._stopping, self._has_text = head + rest, "", False
        self._rows += len(turn)
        self._answering = True
        self._say(turn=turn, most=self.most)

    def _hears(self, tell_worker: Callable[..., None]) -> None:
        self._tell = tell_worker

    def _say(self, **said: Any) -> None:
        assert self._tell is not None
        try:
            self._tell(**said)
        except WorkerError:
            pass  # it has ended the session, since nobody said anything: its result says so

    def _look(self) -> None:
        self._look_of_caller()
        if self._stopping == "asked":
            self._stopping = "told"
            self._say(stop=True)
        if self._waiting:
            self._hear(self._next_turn(None))
        if self._is_open and (makes := self._may_make()) != self._makes:
            self._makes = makes
            self._say(make=makes)


def _answer(said: dict[str, Any], rows: int, cached: int) -> Answer:
    report, traffic = said["report"], said["traffic"]
    return Answer(
        said["text"],
        said["token_ids"],
        report["finish_reason"],
        Seconds(*(said["seconds"][phase] for phase in ("offline", "prefill", "decode"))),
        rows,
        cached,
        payload(traffic, PHASES),
        messages(traffic, PHASES),
        report["steps"],
        report["drafted"],
        report["accepted"],
    )
