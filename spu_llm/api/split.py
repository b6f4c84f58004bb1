"""A client of a split model (NOIR): it keeps both ends, a provider elsewhere has the middle."""

from __future__ import annotations

import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from secrets import choice
from typing import Any, TypeVar

import jax
import numpy as np

from models.family import ModelConfig, Params
from models.files import files_of
from models.hf import load_model
from models.split import Split, ends_digest
from models.stops import Stops, check_text
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling
from spu_llm.api.completion import (
    BothWays,
    Completion,
    CompletionCall,
    Prefetched,
    Seconds,
    complete,
    messages,
    payload,
)
from spu_llm.api.defaults import DRAFT_LENGTH, shipped
from spu_llm.api.events import Event, OnEvent, Token, event_of
from spu_llm.api.preparation import Prepared, likely_steps, prepare
from spu_llm.api.provider import Provider, path_of
from spu_llm.api.texts import encoded
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.net.manifest import Manifest
from spu_llm.net.relay import Relay
from spu_llm.service.client import Server, SessionOutcome, run_as_client
from spu_llm.systems.decoding.request import check_sampling
from spu_llm.systems.split.ends import client_ends, without_table
from spu_llm.systems.split.modes import ENDS, MODES, MPC, NOIR, PLAIN
from spu_llm.systems.split.records import GENERATE, GenerateInputs, GenerateRequest, check_front
from spu_llm.systems.split.secure_records import (
    SPLIT_COMPLETION,
    SPLIT_PREPARATION,
    MiddleInputs,
    MiddlePrepareRequest,
    MiddleRequest,
)
from spu_llm.systems.split.state import ClientSecrets, Settings

R = TypeVar("R", bound=MiddleRequest)

PREFIX_LETTERS = 8  # the paper's most: 20 made its texts worse
_OF_SHARES = ("draft_length", "draft_model", "show_progress", "top_k")
_OF_ROWS = ("precision",)


@dataclass(frozen=True)
class SplitOptions:
    """Options of a text of a split model. The provider learns `max_new_tokens`, in mode
    mpc also `draft_length` and `show_progress`, in the others `precision`.
    """

    max_new_tokens: int = 32
    temperature: float = 0.7  # 0 is greedy
    top_p: float = 1.0  # draw among the likeliest tokens that hold this mass
    stop: Sequence[str] = ()  # texts, or names of special tokens, that the text ends before
    seed: int | None = None  # fixes sampling
    # Of mode mpc alone:
    top_k: int | None = None  # draw among so many likeliest tokens
    draft_length: int | None = None  # drafts of a secure step, 0 for none; `DRAFT_LENGTH` if None
    draft_model: Path | None = None  # directory; the shipped public model by default
    show_progress: bool = False  # the provider learns how many drafts stay, step by step
    # Of the other modes alone:
    precision: str = "float32"  # of what crosses the boundaries; or "float16", "bfloat16"
    random_prefix: bool = False  # in noir: random letters before the prompt

    def __post_init__(self) -> None:
        """Take a path as text, too. InputError for one text in place of several."""
        if isinstance(self.stop, str):
            raise InputError("stop is a list; put a single one in brackets")
        object.__setattr__(self, "draft_model", path_of(self.draft_model))

    @property
    def drafts(self) -> int:
        """Return how many drafts a secure step verifies."""
        return DRAFT_LENGTH if self.draft_length is None else self.draft_length

    @property
    def sampling(self) -> Sampling:
        """Return the rule by which a token is drawn."""
        return Sampling(self.temperature, self.top_k or 0, self.top_p)

    def check(self, mode: str) -> None:
        """Raise InputError for options that a text in this mode has not."""
        if self.random_prefix and mode != NOIR:
            raise InputError("--random-prefix is of --mode noir; leave it out")
        defaults = {option.name: option.default for option in fields(self)}
        names, where = (_OF_ROWS, f"{PLAIN} or {NOIR}") if mode == MPC else (_OF_SHARES, MPC)
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise InputError(f"--{name.replace('_', '-')} is of --mode {where}; leave it out")
        check_sampling(self.sampling)


@dataclass(frozen=True)
class SplitClient:
    """A client that computes the ends of a model which both parties have.

    In mode "plain" the provider can read the text off the rows that it gets; in "noir" the rows are
    under a secret codebook; in "mpc" both parties compute the middle on shares. Every call is a
    session of its own; `Completion.learned` says what each party learned.
    """

    provider: Provider  # one made by `Provider.at`, which serves this mode and split
    mode: str
    split: Split = Split(1, 1)
    model: Path = field(default_factory=lambda: shipped("private"))  # directory
    secrets: Path | None = None  # directory that `tune` made, of mode noir

    def complete(
        self,
        prompt: str,
        options: SplitOptions = SplitOptions(),
        on_event: OnEvent = lambda event: None,
        *,
        on_wait: Callable[[str], None] = lambda words: None,
        started: float | None = None,
    ) -> Completion:
        """Complete a secret prompt; arguments and errors as of `spu_llm.Client.complete`."""
        started = time.monotonic() if started is None else started
        options.check(self.mode)
        if self.mode == MPC:
            return complete(self._call(prompt, options, started), on_event, on_wait)
        return self._complete_by_rows(prompt, options, on_event, started)

    def complete_each(
        self,
        prompts: Sequence[str],
        options: SplitOptions = SplitOptions(),
        on_event: OnEvent = lambda event: None,
    ) -> list[str]:
        """Return a completion of each secret prompt, all of one session, in mode plain or noir;
        arguments and errors as of `complete`. The provider learns how long each prompt is.
        """
        if self.mode == MPC:
            raise InputError("--mode mpc has a text a session; use plain or noir")
        options.check(self.mode)
        texts = self._by_rows(prompts, options, on_event)[0].result["texts"]
        return [text["text"] for text in texts]

    def prepare(
        self,
        prompt: str | int,
        options: SplitOptions = SplitOptions(),
        on_event: OnEvent = lambda event: None,
        *,
        steps: int | None = None,
        disk_bytes: int | None = None,
    ) -> Prepared:
        """Make correlated randomness for a text to come in mode mpc; arguments and errors as of
        `spu_llm.Client.prepare`.
        """
        if self.mode != MPC:
            raise InputError("--mode mpc alone has something to prepare")
        options.check(self.mode)
        tokenizer = Tokenizer.load(self._draft_model(options))
        tokens = prompt if isinstance(prompt, int) else len(_tokens(prompt, tokenizer))
        if steps is None:
            steps = likely_steps(options.max_new_tokens, options.drafts)
        request = self._request(MiddlePrepareRequest, options, tokens, steps=steps)
        return prepare(
            request, tokenizer, self.provider, on_event, disk_bytes, program=SPLIT_PREPARATION
        )

    def server(self) -> Server:
        """Return where the provider listens; InputError for one on this machine."""
        if self.provider.server is None:
            raise InputError("the provider of a split model listens elsewhere; use Provider.at")
        return self.provider.server

    def loaded(self) -> tuple[ModelConfig, Params]:
        """Return the model. InputError where it cannot be split like this in this mode."""
        if self.mode not in MODES:
            raise InputError(f"--mode must be {', '.join(MODES)}, found {self.mode!r}")
        check_front(self.mode, self.split)
        config, params = load_model(self.model)
        self.split.check(config)
        return config, params

    # ---- mode mpc

    def _call(self, prompt: str, options: SplitOptions, started: float) -> CompletionCall:
        directory = self._draft_model(options)
        tokenizer = Tokenizer.load(directory)
        tokens = _tokens(prompt, tokenizer)
        inputs = MiddleInputs(
            tokens,
            str(self.model),
            str(directory),
            options.temperature,
            options.top_k or 0,
            options.top_p,
            list(options.stop),
            options.seed,
            options.seed,
        )
        return CompletionCall(
            self._request(MiddleRequest, options, len(tokens)),
            inputs,
            self.provider,
            tokenizer,
            program=SPLIT_COMPLETION,
            model=self.model,
            started=started,
        )

    def _draft_model(self, options: SplitOptions) -> Path:
        """Return the directory of the model that drafts; of the model itself, without drafts."""
        return (options.draft_model or shipped("public")) if options.drafts else self.model

    def _request(self, kind: type[R], options: SplitOptions, prompt_tokens: int, **more: Any) -> R:
        """Return what both parties know of a text in mode mpc."""
        self.server()
        _, params = self.loaded()
        request = kind(
            prompt_tokens,
            options.max_new_tokens,
            options.drafts,
            show_progress=options.show_progress,
            front=self.split.front,
            back=self.split.back,
            ends=ends_digest(params, self.split),
            **more,
        )
        request.check_options()
        return request

    # ---- modes plain and noir

    def _complete_by_rows(
        self, prompt: str, options: SplitOptions, on_event: OnEvent, started: float
    ) -> Completion:
        first_token: list[float] = []

        def heard(event: Event) -> None:
            if isinstance(event, Token) and not first_token:
                first_token.append(time.monotonic() - started)
            on_event(event)

        outcome, agreed = self._by_rows([prompt], options, heard)
        result, phases = outcome.result, {"offline": [], "online": ["prefill", "decode"]}
        (text,) = result["texts"]
        seconds = {phase: round(s, 3) for phase, s in result["seconds"].items()}
        return Completion(
            **text,
            drafted=0,
            accepted=0,
            seconds=Seconds(0.0, **seconds),
            made_beside=Prefetched(0, 0.0),
            first_token_seconds=round(first_token[0], 3),
            elapsed_seconds=round(time.monotonic() - started, 3),
            bytes=payload(result["traffic"], phases),
            messages=messages(result["traffic"], phases),
            wire_bytes=BothWays(outcome.wire_sent, outcome.wire_received),
            per_step=[],
            learned=result["learned"],
            machine=machine(),
            config={
                "stop": list(options.stop),
                "sampling_seed": options.seed,
                "temperature": options.temperature,
                "top_p": options.top_p,
                **agreed,
            },
        )

    def _by_rows(
        self, prompts: Sequence[str], options: SplitOptions, on_event: OnEvent
    ) -> tuple[SessionOutcome, Manifest]:
        """Complete all prompts in a session; return its outcome, and what both parties agreed."""
        for prompt in prompts:
            check_text(prompt, "the prompt")
        server = self.server()
        config, params = self.loaded()
        tokenizer = Tokenizer.load(self.model)
        Stops.of(options.stop, tokenizer)
        secrets = self._tuned(config, params)
        before = [_random_letters() if options.random_prefix else "" for _ in prompts]
        texts = [b + prompt for b, prompt in zip(before, prompts, strict=True)]
        tokens = [tokenizer.encode(text) for text in texts]
        settings = None if secrets is None else secrets.settings
        lora = 0 if settings is None else settings.lora
        request = GenerateRequest(
            self.mode,
            *self.split,
            ends_digest(params, self.split),
            options.precision,
            tuning=settings.id if settings is not None and lora else "",
            lora=lora,
            round=secrets.round if secrets is not None and lora else 0,
            prompt_tokens=tuple(map(len, tokens)),
            max_new_tokens=options.max_new_tokens,
        )
        if settings is not None and settings.ends != request.ends:
            raise InputError("--secrets are of another model; give that one as --model")
        request.check(config)
        model, where = self.model.absolute(), self.secrets and self.secrets.absolute()
        inputs = GenerateInputs(
            tokens,
            str(model),
            "" if where is None else str(where),
            options.temperature,
            options.top_p,
            list(options.stop),
            options.seed,
        )

        def heard(said: dict[str, Any], relay: Relay) -> None:
            if (event := event_of(said, relay)) is not None:
                on_event(event)

        return run_as_client(
            server,
            GENERATE,
            request,
            inputs,
            heard,
            tokenizer=tokenizer,
            reads=[*files_of(model), *([] if where is None else [where])],
        )

    def _tuned(self, config: ModelConfig, params: Params) -> ClientSecrets | None:
        """Return what was tuned; None in plain without it. InputError where it does not fit, and in
        noir where the front is still that of the public model `params`, whose rows tell the text.
        """
        if self.secrets is None:
            if self.mode == NOIR:
                raise InputError("--mode noir needs --secrets DIR, which spu-llm split tune makes")
            return None
        secrets = ClientSecrets.load(self.secrets.absolute(), config)
        _check_place(secrets.settings, self)
        if self.mode == NOIR and _untuned(secrets, config, params):
            raise InputError(
                "--secrets have the public model's front still, which tells the text: go on with "
                "spu-llm split tune, and if that has ended, with a provider that answers truly"
            )
        return secrets


def _untuned(secrets: ClientSecrets, config: ModelConfig, params: Params) -> bool:
    """Return whether nothing of the front has moved, as before the first round, or with a provider
    whose gradients are zero.
    """
    public, _ = without_table(client_ends(params, config, secrets.split)[0], config)
    pairs = zip(jax.tree.leaves(public), jax.tree.leaves(secrets.front), strict=True)
    moved = [not np.array_equal(a, b) for a, b in pairs]
    return secrets.round == 0 or (bool(moved) and not any(moved))


def _random_letters() -> str:
    return "".join(choice(string.ascii_lowercase) for _ in range(PREFIX_LETTERS))


def _check_place(settings: Settings, client: SplitClient) -> None:
    """Raise InputError unless secrets were tuned in the client's mode and split."""
    if (settings.mode, settings.split) != (client.mode, client.split):
        raise InputError(
            f"--secrets were tuned with --mode {settings.mode} --split "
            f"{settings.front},{settings.back}; give the same"
        )
    if settings.mode == NOIR and (settings.leave_out or settings.tuned != ENDS):
        without = f"without a {settings.leave_out}" if settings.leave_out else "with a public front"
        raise InputError(
            f"--secrets were tuned {without}, to be attacked: nobody should send text under them; "
            "tune others"
        )


def _tokens(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt, with those that are put before any text: none are public."""
    public, own = encoded("", prompt, tokenizer)
    return [*public, *own]
