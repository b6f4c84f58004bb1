"""A client of a provider's private model: completions, answers in chats, preparation for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from models.chat import Message
from models.text_format import TextFormat
from models.tokenizer import Tokenizer
from spu_llm.api.completion import Completion, CompletionCall, complete
from spu_llm.api.defaults import DRAFT_LENGTH
from spu_llm.api.drafting import Drafting
from spu_llm.api.events import OnEvent
from spu_llm.api.marking import KeyFiles, Marking, provider_key
from spu_llm.api.preparation import Prepared, Producers, likely_steps, prepare, restock
from spu_llm.api.provider import Provider, path_of
from spu_llm.api.texts import chat_tokens, check_messages, check_texts, tokens_of_prompt
from spu_llm.core.errors import InputError
from spu_llm.service.first_contact import KeptFormat
from spu_llm.service.supervisor import Look
from spu_llm.systems.decoding.records import MARKED, ClientInputs, PrepareRequest
from spu_llm.systems.decoding.request import Request


@dataclass(frozen=True)
class CompletionOptions:
    """Options of a text that is to be written. The provider learns all but `stop`, `drafts`,
    `draft_model`, `watermark` and `seed`.
    """

    max_new_tokens: int = 32
    temperature: float = 0.7  # 0 is greedy
    top_k: int = 0  # with verify "post": draw among so many likeliest tokens; 0: among all
    top_p: float = 1.0  # with verify "post": draw among the likeliest that hold this mass
    stop: Sequence[str] = ()  # texts, or names of special tokens, that the text ends before
    public_prefix: str = ""  # text before the prompt that the provider may know
    draft_length: int = DRAFT_LENGTH  # drafts of a secure step; 0: none
    draft_model: Path | None = None  # directory; the shipped public model by default
    drafts: str | None = None  # by "model", "ngram" or "both"; None: both where there is a model
    verify: str = "token"  # or "race", "marked"; as published "post", "naive"
    show_progress: bool = False  # the provider learns how many drafts stay, step by step
    # Continuations that a step verifies: a watermark's key chooses one; without a key they are
    # chains of drafts, with verify "race" or greedily, of which the longest stays.
    candidates: int = 1
    watermark: Sequence[Path] = ()  # files with this client's keys
    mark: Path | None = None  # file with the key of a provider here, which marks its texts
    seed: int | None = None  # fixes drafts; with a provider here all of sampling

    def __post_init__(self) -> None:
        """Take paths as text, too. InputError for one text in place of several."""
        for name in ("stop", "watermark"):
            if isinstance(getattr(self, name), str | Path):
                raise InputError(f"{name} is a list; put a single one in brackets")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "watermark", tuple(map(Path, self.watermark)))
        for name in ("draft_model", "mark"):
            object.__setattr__(self, name, path_of(getattr(self, name)))

    def check(self, prompt: str) -> KeyFiles | None:
        """Return the keys of `watermark`, if there are any. InputError for what no provider could
        serve; nothing is sent.
        """
        keys = self.keys()
        check_texts(self.public_prefix, prompt)
        self.request(1, (), self.draft_length).check_options()
        return keys

    def keys(self) -> KeyFiles | None:
        """Return the keys of `watermark`; InputError for candidates that nothing chooses among."""
        keys = KeyFiles.read(
            self.watermark, self.verify, self.candidates, greedy=self.temperature == 0
        )
        if keys is None and self.candidates != 1:
            by_text = self.drafts == "ngram"
            if not self.draft_length or by_text:
                raise InputError(
                    "--candidates without --watermark are chains of drafts, which a model makes; "
                    f"leave {'--drafts ngram' if by_text else '--standard'} out"
                )
        return keys

    def request(self, prompt_tokens: int, prefix: Sequence[int], draft_length: int) -> Request:
        """Return what both parties know of such a completion."""
        return Request(
            prompt_tokens,
            self.max_new_tokens,
            draft_length,
            self.temperature,
            self.verify,
            self.top_k,
            self.top_p,
            candidates=self.candidates,
            show_progress=self.show_progress,
            public_prefix=tuple(prefix),
        )


@dataclass(frozen=True)
class Client:
    """A client of one provider. Every call is a session of its own; both parties' processes end
    with it. Errors are `spu_llm.SpuLlmError`, of the kind that says who failed.
    """

    provider: Provider

    def complete(
        self,
        prompt: str,
        options: CompletionOptions = CompletionOptions(),
        on_event: OnEvent = lambda event: None,
        *,
        on_wait: Callable[[str], None] = lambda words: None,
        look: Look = lambda: None,
        started: float | None = None,
    ) -> Completion:
        """Complete a secret prompt with the provider's private model.

        The client learns the emitted tokens; the provider the prompt's length in tokens, the
        options that `CompletionOptions` names, and the number of steps: `Completion.learned` says
        all. on_event: gets each event in the calling thread; what it raises ends the session.
        on_wait: gets a sentence while a preparation in the same pool gives way. look: called now
        and then, may end the session by an error. started: on the monotonic clock, what seconds are
        counted from. SpuLlmError, of the kind that says who failed; it names options as the command
        line does.
        """
        started = time.monotonic() if started is None else started
        keys = options.check(prompt)
        text = self.provider.text_format()
        tokenizer = text.text.tokenizer
        prefix, tokens = tokens_of_prompt(options.public_prefix, prompt, text.text)
        with (
            nullcontext() if keys is None else keys.opened(tokenizer) as marking,
            self._with_key(options) as provider,
        ):
            call = self._call(provider, text, prefix, tokens, options, marking, started)
            return complete(call, on_event, on_wait, look)

    def chat(
        self,
        messages: Sequence[Message],
        options: CompletionOptions = CompletionOptions(max_new_tokens=256),
        on_event: OnEvent = lambda event: None,
        *,
        on_wait: Callable[[str], None] = lambda words: None,
        look: Look = lambda: None,
        started: float | None = None,
    ) -> Completion:
        """Answer a chat by the model's own template; each call prefills the whole chat.

        The provider learns what `complete` tells it, and in the clear what the template writes
        before the first words, which follows from the roles and number of messages. Other
        arguments as of `complete`. InputError for a model that has no chats.
        """
        started = time.monotonic() if started is None else started
        self.check_chat(messages, options)
        text = self.provider.text_format()
        prefix, tokens = chat_tokens(text, messages)
        with self._with_key(options) as provider:
            call = self._call(provider, text, prefix, tokens, options, None, started)
            return complete(call, on_event, on_wait, look)

    def check_chat(self, messages: Sequence[Message], options: CompletionOptions) -> None:
        """Raise InputError for a chat that no provider could serve; nothing is sent."""
        if options.public_prefix or options.watermark:
            raise InputError(
                "a chat begins with its template's public words and has no watermark; leave "
                "--public-prefix and --watermark out, or --chat"
            )
        options.keys()
        check_messages(messages)
        options.request(1, (), options.draft_length).check_options()

    def prepare(
        self,
        prompt: str | int,
        options: CompletionOptions = CompletionOptions(),
        on_event: OnEvent = lambda event: None,
        *,
        steps: int | None = None,
        disk_bytes: int | None = None,
        look: Look = lambda: None,
        producers: Producers | None = None,
    ) -> Prepared:
        """Make correlated randomness for a completion to come, which takes it from the same pool.

        The provider learns the prompt's length and the options, as of that completion. prompt: one
        of the same length in tokens, or that length. steps: of the completion; as many as are
        likely by default. disk_bytes: that the pool may take in all. look: called now and then, may
        end it by an error. producers: who makes it in place of a session here. InputError for a
        provider without a pool; `NoRoom` when one step does not fit.
        """
        request, text = self._to_prepare(prompt, options, steps)
        with self._with_key(options) as provider:
            return prepare(
                request,
                text.tokenizer,
                provider,
                on_event,
                disk_bytes,
                look,
                text_format=text.digest,
                producers=producers,
            )

    def restock(
        self,
        prepared: Prepared,
        prompt: str | int,
        options: CompletionOptions,
        producers: Producers,
        on_event: OnEvent = lambda event: None,
        *,
        steps: int | None = None,
        look: Look = lambda: None,
    ) -> int:
        """Have producers make what the pool no longer has of what was `prepared` with the same
        arguments, while sessions may use it; return how many batches came.
        """
        request, text = self._to_prepare(prompt, options, steps)
        assert self.provider.pool is not None
        folder = self.provider.pool / prepared.config["peer"]
        return restock(
            prepared, request, folder, producers, on_event, look, text_format=text.digest
        )

    def _to_prepare(
        self, prompt: str | int, options: CompletionOptions, steps: int | None
    ) -> tuple[PrepareRequest, TextFormat]:
        """Return what a session is asked to prepare, and how the provider's text is written."""
        self.check_preparation(prompt, options, steps)
        text = self.provider.text_format().text
        public, tokens = tokens_of_prompt(
            options.public_prefix, prompt if isinstance(prompt, str) else ".", text
        )
        drafts = self._drafting(options, text.tokenizer).length
        if steps is None:
            steps = likely_steps(options.max_new_tokens, drafts)
        length = len(tokens) if isinstance(prompt, str) else prompt
        return _to_come(options.request(length, public, drafts), steps), text

    def chat_to_prepare(
        self, turn_tokens: int, options: CompletionOptions
    ) -> tuple[PrepareRequest, TextFormat]:
        """Return what a session is asked to prepare for chats, and how the provider's text is
        written: a turn of so many tokens, and an answer as `options` have it, take almost all that
        a completion does. InputError for a model that has no chats.
        """
        text = self.provider.text_format()
        prefix, _ = chat_tokens(text, [Message("user", ".")])
        drafts = self._drafting(options, text.text.tokenizer).length
        steps = likely_steps(options.max_new_tokens, drafts)
        return _to_come(options.request(turn_tokens, prefix, drafts), steps), text.text

    def check_preparation(
        self, prompt: str | int, options: CompletionOptions, steps: int | None
    ) -> None:
        """Raise InputError for what no provider could prepare; nothing is sent."""
        if self.provider.pool is None:
            raise InputError("what is made ahead is kept in a pool; give the Provider one")
        check_texts(options.public_prefix, prompt if isinstance(prompt, str) else ".")
        length = 1 if isinstance(prompt, str) else prompt
        _to_come(options.request(length, (), options.draft_length), steps or 0).check_options()

    def _call(
        self,
        provider: Provider,
        text: KeptFormat,
        prefix: Sequence[int],
        tokens: list[int],
        options: CompletionOptions,
        marking: Marking | None,
        started: float,
    ) -> CompletionCall:
        drafting = self._drafting(options, text.text.tokenizer)
        if marking is None and options.candidates != 1 and not drafting.length:
            raise InputError(
                "--candidates are chains of drafts, and no model drafts this text; give "
                "--draft-model DIR, a model with the same tokenizer, or leave --candidates out"
            )
        inputs = ClientInputs(
            tokens,
            str(text.path),
            list(options.stop),
            options.seed,
            options.seed if provider.server is None else None,
            None if marking is None else marking.mark,
            None if drafting.directory is None else str(drafting.directory),
            drafting.ngrams,
        )
        return CompletionCall(
            options.request(len(tokens), prefix, drafting.length),
            inputs,
            provider,
            text.text.tokenizer,
            text,
            marking=marking,
            started=started,
        )

    def _drafting(self, options: CompletionOptions, tokenizer: Tokenizer) -> Drafting:
        return Drafting.of(
            tokenizer,
            options.draft_length,
            options.draft_model,
            options.drafts,
            marked=options.verify == MARKED,
        )

    @contextmanager
    def _with_key(self, options: CompletionOptions) -> Iterator[Provider]:
        """Yield the provider, with the key that it marks under if it is here and is to mark."""
        provider, elsewhere = self.provider, self.provider.server is not None
        with provider_key(
            options.verify, options.mark, provider.model, elsewhere=elsewhere
        ) as mark:
            yield replace(provider, mark=mark)


def _to_come(request: Request, steps: int) -> PrepareRequest:
    return PrepareRequest(**vars(request), steps=steps)
