"""A conversation with a provider's model: turns in a session whose cache stays, and where one
session ends, another one that begins with all that was said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from models.chat import Message, cut, going_on
from spu_llm.api.client import CompletionOptions
from spu_llm.api.completion import Seconds, reads_of
from spu_llm.api.drafting import Drafting
from spu_llm.api.events import Learned, Note, OnEvent, Text, event_of
from spu_llm.api.provider import Provider
from spu_llm.api.texts import chat_encoded, check_messages, renderer
from spu_llm.core.errors import InputError, PeerError, WorkerError
from spu_llm.net.relay import Relay
from spu_llm.service.client import Server, run_as_client
from spu_llm.service.supervisor import Look
from spu_llm.systems.decoding.chat_request import ChatRequest
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


NextTurn = Callable[[Answer | None], str | None]


class Conversation:
    """A conversation by the model's own template. The provider learns when turns come, how many
    tokens each has, the number of each answer's steps, and in the clear what the template writes
    before the first words.
    """

    def __init__(
        self,
        provider: Provider,
        options: CompletionOptions = CompletionOptions(max_new_tokens=256),
        *,
        before: Sequence[Message] = (),
    ) -> None:
        """Prepare a conversation; nothing is computed yet.

        options: of them a conversation has the limit of an answer, temperature, drafts and their
        seed. before: what comes before the first turn, on shares: what a system says, earlier turns
        and answers. InputError for other options, and for a model that has no chats.
        """
        for option in fields(options):
            if option.name not in _OPTIONS and getattr(options, option.name) != option.default:
                raise InputError(f"a conversation has no --{option.name.replace('_', '-')}")
        self._provider, self._options = provider, options
        self._text = provider.text_format()
        self._render = renderer(self._text)
        self._drafts = Drafting.of(
            self._text.text.tokenizer, options.draft_length, options.draft_model, options.drafts
        )
        self.messages: list[Message] = list(before)
        self._rendered = ""  # up to where the last answer begins
        self._cached = self._rows = 0  # of the session's tokens: before the last turn, and with it
        self._tell: Callable[..., None] | None = None  # to the worker
        self._look_of_caller: Look = lambda: None
        self._answering = False
        self._stopping = ""  # of the answer: "asked" for, "told" to the worker
        self._answers = 0  # of this session
        self._has_text = False  # of the answer that is being written

    def hold(
        self, next_turn: NextTurn, on_event: OnEvent = lambda event: None, look: Look = lambda: None
    ) -> None:
        """Take turns until `next_turn` returns None: it gets each answer, at first None, and
        returns what the user says next. on_event: gets each event in the calling thread; `Learned`
        ends a session. look: called now and then while an answer is written, may end the
        conversation by an error. SpuLlmError, of the kind that says who failed.
        """
        self._look_of_caller = look
        first = next_turn(None)
        if first is None:
            return
        self.messages.append(Message("user", first))
        check_messages(self.messages)
        # Of a provider here, which serves a session.
        seed = self._options.seed if self._provider.server is None else None
        while self.messages[-1].role == "user":
            try:
                with self._provider.reached(seed) as (server, pool):
                    self._session(server, pool, seed, next_turn, on_event)
            except PeerError as error:
                # While nobody says anything, a provider may end a session, or start again.
                if not self._answers or self._has_text:
                    raise
                words = f"the session ended ({error}); beginning another one"
                on_event(Note(words))
            finally:
                self._answering = False

    def stop(self) -> bool:
        """End the answer that is being written, from any thread or a signal's handler. Return
        whether there is one that has not been stopped before.
        """
        if not self._answering or self._tell is None or self._stopping:
            return False
        self._stopping = "asked"
        return True

    def _session(
        self,
        server: Server,
        pool: Any,
        sampling_seed: int | None,
        next_turn: NextTurn,
        on_event: OnEvent,
    ) -> None:
        """Answer the last turn, and those after it while they go on from there."""
        self._answers, self._has_text = 0, False
        head, rest = cut(self._render, self.messages)
        self._rendered = head + rest
        prefix, prompt = chat_encoded(self._text, head, rest)
        self._cached, self._rows = 0, len(prefix) + len(prompt)
        drafts, provider = self._drafts, self._provider
        request = ChatRequest(
            len(prompt),
            self._options.max_new_tokens,
            drafts.length,
            temperature=self._options.temperature,
            public_prefix=tuple(prefix),
            conversation_tokens=CONVERSATION_TOKENS,
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
            if said["event"] == "answer":
                self._answering = False
                self._answered(_answer(said, self._rows, self._cached), next_turn)
                self._answering = True

        self._answering, self._stopping = True, ""
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
        on_event(Learned(outcome.result["learned"]))

    def _answered(self, answer: Answer, next_turn: NextTurn) -> None:
        """Go on with what the user says after an answer."""
        self._answers += 1
        self.messages.append(Message("assistant", answer.text))
        said = next_turn(answer)
        if said is None:
            return self._say(end=True)
        self.messages.append(Message("user", said))
        after = "".join(cut(self._render, self.messages))
        added = going_on(self._rendered, answer.text, after)
        if added is None:  # the template writes the past in another way: it is prefilled again
            return self._say(end=True)
        self._rendered, self._stopping, self._has_text = after, "", False
        turn = self._text.text.tokenizer.encode(added, goes_on=True)
        before = self._rows + len(answer.token_ids)
        # The row of the answer's last token is computed with the turn.
        self._cached, self._rows = before - 1, before + len(turn)
        self._say(turn=turn)

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


def _answer(said: dict[str, Any], rows: int, cached: int) -> Answer:
    seconds = Seconds(*(said["seconds"][phase] for phase in ("offline", "prefill", "decode")))
    end = said["report"]["finish_reason"]
    return Answer(said["text"], said["token_ids"], end, seconds, rows, cached)
