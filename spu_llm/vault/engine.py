"""The process of the model's owner: streams weights to vaults, generates for all of them at a time.

A thread for each vault, which opens its session; one thread steps all lanes of all sessions
together. A vault that fails, or does not answer in time, leaves; the others go on.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from models.digest import digest_of
from models.family import ModelConfig
from models.hf import load_folded
from models.partials import Partial
from models.tokenizer import Tokenizer
from spu_llm.core.errors import BusyError, PeerError, SpuLlmError, WireError
from spu_llm.core.freed import give_back
from spu_llm.net.entrance import Entrance, Met
from spu_llm.net.identity import Identity
from spu_llm.net.messages import Messages
from spu_llm.net.stream import listen
from spu_llm.service import listening
from spu_llm.service.listening import Callers, Strangers
from spu_llm.service.renewing import Renewal
from spu_llm.systems.confidential.engine import Engine
from spu_llm.vault import told
from spu_llm.vault.attested import Policy

T = TypeVar("T")

_START_S = 60.0  # for a block of a prefill
_ROUND_S = 10.0  # for all that a vault does in a step; less than what a vault waits for another one


@dataclass(frozen=True)
class EngineOptions:
    model: Path
    host: str
    port: int
    lanes: int  # at a time, of all vaults
    identity: Identity | None
    policy: Policy | None = None  # that evidence of vaults is to meet
    exit_with_parent: bool = False


@dataclass
class _Session:
    """The lanes of one vault that go on, each with its last token."""

    messages: Messages
    lanes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    error: SpuLlmError | None = None

    def tried(self, action: Callable[[], T]) -> T | None:
        """Return what `action` gives; None when it, or an action before it, has failed."""
        if self.error is None:
            try:
                return action()
            except SpuLlmError as exc:
                self.error = exc
        return None


def serve(
    options: EngineOptions,
    say: Callable[[str], None],
    on_port: Callable[[int], None],
    make: Callable[[ModelConfig, Any, int], Engine] = Engine,
    renewal: Renewal[EngineOptions] | None = None,
) -> None:
    """Serve vaults until interrupted. `on_port` hears where it listens. make: the engine, of a
    model's shape and folded weights with so many lanes; one that is studied notes what it sees.
    Whoever connects meets the identity that `renewal` reads.
    """
    config, weights = load_folded(options.model)
    tokenizer = Tokenizer.load(options.model)
    digest = digest_of(told.parts_of(weights))
    model = told.Model(config.asdict(), sorted(tokenizer.eos_ids), digest, tokenizer.digest)
    give_back()
    share = options.lanes if options.identity is None else -(-options.lanes // 2)
    made = make(config, weights, options.lanes)
    sessions = _Sessions(made, share, model, options.policy, say)
    with (
        sessions,
        listen(options.host, options.port) as listener,
        closing(Entrance(listener, options.identity, Strangers(say).refused)) as entrance,
    ):
        on_port(listener.getsockname()[1])
        listening.listen(
            entrance,
            sessions.start,
            options.exit_with_parent,
            look=lambda: (
                None
                if renewal is None
                else renewal.look(lambda renewed: entrance.renew(renewed.identity))
            ),
        )


class _Sessions:
    """All vaults' sessions, and the thread that steps them. share: of lanes, that vaults with one
    certificate may have.
    """

    def __init__(
        self,
        engine: Engine,
        share: int,
        model: told.Model,
        policy: Policy | None,
        say: Callable[[str], None],
    ) -> None:
        self._engine, self._share, self._model, self._say = engine, share, model, say
        self._policy = policy
        self._callers = Callers(self._serve)
        self.start = self._callers.start
        self._changed = threading.Condition()
        self._going: list[_Session] = []
        self._lanes_of: Counter[str] = Counter()  # by certificates
        self._stopped = False
        self._stepping = threading.Thread(target=self._run, name="steps", daemon=True)

    def __enter__(self) -> _Sessions:
        self._stepping.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._stopped = True
            going = list(self._going)
            self._changed.notify_all()
        for session in going:
            session.messages.fail("the engine is shutting down")

    # ---- a vault's thread

    def _serve(self, met: Met) -> None:
        told.answer(
            met, "the vault", self._session, lambda why: self._say(f"session failed: {why}")
        )

    def _session(self, met: Met, messages: Messages) -> None:
        messages.hear("hello")
        told.say_record(messages, "model", self._model)
        try:
            asked = messages.hear("open")
        except PeerError as exc:
            if "ended the connection" in str(exc):  # it only wanted to see the model
                return
            raise
        if self._policy is not None:
            self._policy.check(asked.get("evidence"), messages.certificate)
        count = asked.get("lanes")
        if not isinstance(count, int) or not 1 <= count <= told.MAX_LANES:
            raise WireError("the vault asks for lanes that cannot be")
        with self._lanes(met.caller, count) as lanes:
            self._callers.settled(met)
            self._run_lanes(_Session(messages, lanes=list(lanes)))

    @contextmanager
    def _lanes(self, caller: str, count: int) -> Iterator[list[int]]:
        """Yield `count` lanes; BusyError when fewer are free, or are left for this certificate."""
        with self._changed:
            if count > self._engine.free:
                raise BusyError(f"the engine has no room for {count} more texts; try later")
            if self._lanes_of[caller] + count > self._share:
                raise BusyError(
                    f"the engine has room for {self._share} texts of one certificate at a time; "
                    "ask for fewer, or try later"
                )
            self._lanes_of[caller] += count
            lanes = [self._engine.join() for _ in range(count)]
        try:
            yield lanes
        finally:
            with self._changed:
                for lane in lanes:
                    self._engine.leave(lane)
                self._lanes_of[caller] -= count
                self._lanes_of += Counter()  # without those that have none

    def _run_lanes(self, session: _Session) -> None:
        messages = session.messages
        messages.say("room")
        messages.hear("weights")
        messages.answer_s = _START_S  # a vault reads nothing while it computes a block
        for part in told.parts_of(self._engine.weights):
            messages.send(*(np.asarray(leaf) for leaf in jax.tree.leaves(part)))
        self._begin(session)
        if not session.lanes:  # one token was asked for
            return
        messages.answer_s = _ROUND_S
        with self._changed:
            if self._stopped:
                raise PeerError("the engine is shutting down")
            self._going.append(session)
            self._changed.notify_all()
        session.over.wait()
        if session.error is not None:
            raise session.error

    def _begin(self, session: _Session) -> None:
        """Take lengths of prompts, the keys and values of what is public, and the first tokens."""
        messages, config = session.messages, self._engine.config
        start = messages.hear("start")
        lengths, public = start.get("lengths"), start.get("public")
        if (
            not isinstance(lengths, list)
            or len(lengths) != len(session.lanes)
            or not all(type(n) is int and 1 <= n < config.context for n in lengths)
        ):
            raise WireError("the vault states lengths that cannot be")
        if type(public) is not int or not 0 <= public < min(lengths):
            raise WireError("the vault states a number of public rows that cannot be")
        for lane, length in zip(session.lanes, lengths, strict=True):
            self._engine.place(lane, length)
        shape = len(lengths), config.kv_heads, public, config.head_dim
        for layer in range(config.layers if public else 0):
            keys, values = messages.take(shape, shape)
            for i, lane in enumerate(session.lanes):
                self._engine.give(lane, layer, keys[i], values[i])
        self._hear_tokens(session)

    # ---- the stepping thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._going) or self._stopped)
                if self._stopped:
                    return
                # In the order of lanes, which lie side by side then: nothing is copied.
                going = sorted(self._going, key=lambda session: session.lanes)
            self._step(going)
            ended = [s for s in going if s.error is not None or not s.lanes]
            with self._changed:
                self._going = [s for s in self._going if s not in ended]
            for session in ended:
                session.over.set()

    def _step(self, going: list[_Session]) -> None:
        lanes = [lane for s in going for lane in s.lanes]
        tokens = [token for s in going for token in s.tokens]
        for session in going:
            session.messages.allow(_ROUND_S)
        try:
            logits = self._engine.step(lanes, tokens, _Vaults(self._engine.config, going))
        except Exception as exc:  # of this program's own: all of them hear of it
            for session in going:
                session.error = session.error or SpuLlmError(f"{type(exc).__name__}: {exc}")
            return
        ends = np.cumsum([len(s.lanes) for s in going])[:-1]
        for session, rows in zip(going, np.split(logits, ends), strict=True):
            session.tried(functools.partial(session.messages.send, rows))
        for session in going:
            session.tried(functools.partial(self._hear_tokens, session))

    def _hear_tokens(self, session: _Session) -> None:
        """Take the next token of each lane, or its end."""
        count, vocab = len(session.lanes), self._engine.config.vocab_size
        (tokens,) = session.messages.take((count,), dtype=np.int32)
        if not ((tokens >= told.END) & (tokens < vocab)).all():
            raise WireError("the vault sent tokens that do not exist")
        kept = [i for i in range(count) if tokens[i] != told.END]
        if any(self._engine.is_full(session.lanes[i]) for i in kept):
            raise WireError("the vault goes on past the model's context")
        session.lanes = [session.lanes[i] for i in kept]
        session.tokens = [int(tokens[i]) for i in kept]


class _Vaults:
    """The lanes' other keys and values, of several vaults."""

    def __init__(self, config: ModelConfig, sessions: list[_Session]) -> None:
        self._config, self._sessions = config, sessions

    def ask(self, layer: int, query: np.ndarray) -> None:
        self._shape = query.shape
        ends = np.cumsum([len(s.lanes) for s in self._sessions])[:-1]
        for session, rows in zip(self._sessions, np.split(query, ends), strict=True):
            session.tried(functools.partial(session.messages.send, rows))

    def answer(self, layer: int) -> Partial:
        answers = [self._answer(session) for session in self._sessions]
        return Partial(*(np.concatenate(parts) for parts in zip(*answers, strict=True)))

    def _answer(self, session: _Session) -> Partial:
        """Return the answers of a session's vault; of a session that has failed, no rows at all."""
        out = len(session.lanes), *self._shape[1:]
        shapes = out, out[:-1], out[:-1]
        arrays = session.tried(functools.partial(session.messages.take, *shapes))
        return Partial(*(arrays or (np.zeros(shape, np.float32) for shape in shapes)))
