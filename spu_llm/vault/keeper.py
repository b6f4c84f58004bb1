"""A user's vault: keeps the prompt's keys and values, answers the engine, draws the tokens.

It belongs into a confidential virtual machine, whose evidence it can show (`attested`): what is
trusted with the prompt and, for the time of a prefill, with the weights, is this process. One
request at a time, each a session with the engine; others wait, once they have said all of theirs.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.digest import update
from models.family import ModelConfig
from protocols.verification.distribution import Sampling, draw
from spu_llm.core.errors import InputError, PeerError, SpuLlmError
from spu_llm.core.freed import give_back
from spu_llm.core.prg import Prg
from spu_llm.net.entrance import Entrance, Met
from spu_llm.net.messages import Messages
from spu_llm.net.stream import listen
from spu_llm.service import listening
from spu_llm.service.listening import Callers, Strangers
from spu_llm.service.renewing import Renewal
from spu_llm.systems.confidential.compact import Compact
from spu_llm.systems.confidential.held import Held
from spu_llm.vault import told
from spu_llm.vault.attested import shown
from spu_llm.vault.making import Maker

# An engine may compile, and wait for another vault, before it comes to this one.
_ENGINE_S = 30.0
_STAGE_S = 1.0  # between two lines about a prefill
_BUSY_S = 5.0  # between two lines about anything else
ENGINE = "the engine"


@dataclass(frozen=True)
class VaultOptions:
    engine: told.Place
    listen: told.Place
    maker: Maker  # of fakes, for a user who leaves that to the vault
    evidence: Path | None = None  # a token, read again for each request
    exit_with_parent: bool = False


def keep(
    options: VaultOptions,
    say: Callable[[str], None],
    on_port: Callable[[int], None],
    renewal: Renewal[VaultOptions] | None = None,
) -> None:
    """Serve this vault's user until interrupted. The engine is met at once, and its model may not
    change later. New requests are met under the identities that `renewal` reads.
    """
    engine = _called(options.engine)
    pinned = _model_of(engine)
    engine.close()
    shown(options.evidence)
    requests = _Requests(options, pinned, say)
    with (
        listen(options.listen.host, options.listen.port) as listener,
        closing(Entrance(listener, options.listen.identity, Strangers(say).refused)) as entrance,
    ):

        def renew(renewed: VaultOptions) -> None:
            entrance.renew(renewed.listen.identity)
            requests.engine = renewed.engine

        on_port(listener.getsockname()[1])
        listening.listen(
            entrance,
            requests.start,
            options.exit_with_parent,
            look=lambda: None if renewal is None else renewal.look(renew),
        )


class _Requests:
    """Requests of the vault's user, one after the other. `engine`: where each finds the engine."""

    def __init__(
        self, options: VaultOptions, pinned: told.Model, say: Callable[[str], None]
    ) -> None:
        self.engine, self._pinned, self._say = options.engine, pinned, say
        self._evidence, self._maker = options.evidence, options.maker
        self._callers = Callers(self._serve)
        self.start = self._callers.start
        self._turn = threading.Lock()

    def _serve(self, met: Met) -> None:
        """Serve one request; what fails is told to the user, and the next one may come."""
        told.answer(met, "the user", self._request, lambda why: self._say(f"request failed: {why}"))

    def _request(self, met: Met, user: Messages) -> None:
        pinned = self._pinned
        user.hear("hello")
        user.say("evidence", token=shown(self._evidence))
        told.say_record(user, "model", pinned)
        message = user.hear("prompts", "marked")
        if message["type"] == "prompts":
            asked, prompts = self._taken(user, message)
        # Whoever says nothing more holds nobody up.
        with self._in_turn(user):
            self._callers.settled(met)
            if message["type"] == "marked":
                asked, prompts = self._made(user, message)
            engine = _called(self.engine)
            try:
                if _model_of(engine) != pinned:
                    raise InputError(
                        "the engine's model is another one than when this vault was opened; open "
                        "it anew if that is meant"
                    )
                Session(user, engine, pinned, asked, prompts).run(shown(self._evidence))
            finally:
                engine.close()

    @contextmanager
    def _in_turn(self, user: Messages) -> Iterator[None]:
        """Yield when no other request runs; the user hears that it waits."""
        if not self._turn.acquire(blocking=False):
            with _saying(user, "waiting for another request"):
                self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    def _taken(
        self, user: Messages, message: dict[str, Any]
    ) -> tuple[told.VaultRequest, list[list[int]]]:
        """Return a request, and its prompts, which the user has made."""
        model = self._pinned.shape
        asked: told.VaultRequest = told.told(told.VaultRequest, message, "the user")
        told.check_asked(asked, model)
        (tokens,) = user.take((sum(asked.lengths),), dtype=np.int32)
        if not ((tokens >= 0) & (tokens < model.vocab_size)).all():
            raise InputError("the prompt has tokens that the model lacks")
        ends = np.cumsum(asked.lengths)[:-1]
        return asked, [part.tolist() for part in np.split(tokens, ends)]

    def _made(
        self, user: Messages, message: dict[str, Any]
    ) -> tuple[told.VaultRequest, list[list[int]]]:
        """Return a request for a prompt with tags, and the prompts that it becomes."""
        wish: told.MarkedRequest = told.told(told.MarkedRequest, message, "the user")
        with _saying(user, "finding fakes"):
            asked, prompts, fakes = self._maker.made(wish, self._pinned.tokenizer)
        told.check_asked(asked, self._pinned.shape)
        told.say_record(user, "fakes", fakes)
        return asked, prompts


@contextmanager
def _saying(user: Messages, what: str) -> Iterator[None]:
    """Tell the user every few seconds, while nothing else is said, what is being done."""
    over = threading.Event()

    def tell() -> None:
        with suppress(SpuLlmError):  # who is told something else later hears of it then
            while True:
                user.say("stage", name=what)
                if over.wait(_BUSY_S):
                    return

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    try:
        yield
    finally:
        over.set()
        telling.join()


def _called(place: told.Place) -> Messages:
    engine = told.call(place, ENGINE)
    engine.answer_s = _ENGINE_S
    return engine


def _model_of(engine: Messages) -> told.Model:
    engine.say("hello")
    model: told.Model = told.told(told.Model, engine.hear("model"), ENGINE)
    return model


class Session:
    """One request's work between user and engine."""

    def __init__(
        self,
        user: Messages,
        engine: Messages,
        model: told.Model,
        asked: told.VaultRequest,
        prompts: list[list[int]],
    ) -> None:
        self._user, self._engine, self._model, self._asked = user, engine, model, asked
        self._config: ModelConfig = model.shape
        self._prompts, self._public = prompts, asked.public
        self._sampling = Sampling(asked.temperature)
        seed = asked.seed
        self._prg = Prg.from_os() if seed is None else Prg.from_seed(seed, "vault sampling")
        self._left = [asked.max_new_tokens] * len(prompts)
        self._eos = frozenset(model.eos)

    def run(self, evidence: str) -> None:
        """Run the request: prefill, then token by token; the user sees each as it is drawn. The
        engine gets evidence of where this process runs before it sends weights.
        """
        engine, started = self._engine, time.monotonic()
        engine.say("open", lanes=len(self._prompts), evidence=evidence)
        engine.hear("room")
        held, logits = self._filled()
        give_back()  # the weights
        engine.say("start", lengths=[len(p) for p in self._prompts], public=len(self._public))
        if self._public:
            for layer in range(self._config.layers):
                engine.send(*held.migrated(layer))
        streamed = dict(engine.array_bytes)
        filled = time.monotonic()
        lanes = self._emit(list(range(len(self._prompts))), logits)
        first = time.monotonic()
        while lanes:
            for layer in range(self._config.layers):
                (query,) = engine.take(self._query(lanes))
                engine.send(*held.reply(layer, lanes, query))
            (logits,) = engine.take((len(lanes), self._config.vocab_size))
            lanes = self._emit(lanes, logits)
        now = engine.array_bytes
        self._user.say(
            "end",
            seconds={"prefill": filled - started, "decode": time.monotonic() - first},
            bytes={
                "prefill": {"to_vault": streamed["received"], "to_engine": streamed["sent"]},
                "decode": {
                    "to_vault": now["received"] - streamed["received"],
                    "to_engine": now["sent"] - streamed["sent"],
                },
            },
        )

    def _query(self, lanes: list[int]) -> tuple[int, ...]:
        config = self._config
        return len(lanes), config.kv_heads, config.query_groups, config.head_dim

    def _filled(self) -> tuple[Held, np.ndarray]:
        """Return keys and values of the prompts, and logits after them, as weights pass through."""
        held = self._empty()
        digest, last = hashlib.sha256(), time.monotonic()
        self._engine.say("weights")
        shapes = list(told.part_shapes(self._config))
        for i, shape in enumerate(shapes):
            if time.monotonic() - last > _STAGE_S or i == 0:
                last = time.monotonic()
                self._user.say("stage", name=f"prefill, layer {i} of {len(shapes) - 2}")
            part = self._part(shape)
            update(digest, part)
            if i == 0:
                held.begin(part)
            elif i < len(shapes) - 1:
                held.block(part)
            else:
                logits = held.end(part)
        if digest.hexdigest() != self._model.weights:
            raise PeerError("the engine sent other weights than those that it stands for")
        return held, logits

    def _empty(self) -> Held:
        asked = self._asked
        if not asked.fakes:
            return Held(self._config, self._prompts, self._public)
        return Compact(self._config, self._prompts, self._public, asked.fakes, asked.own)

    def _part(self, shape: Any) -> Any:
        leaves, tree = jax.tree.flatten(shape)
        return jax.tree.unflatten(tree, self._engine.take(*(leaf.shape for leaf in leaves)))

    def _emit(self, lanes: list[int], logits: np.ndarray) -> list[int]:
        """Draw a token for each of these lanes, tell engine and user, and return those that go
        on.
        """
        tokens = self._drawn(logits)
        for lane in lanes:
            self._left[lane] -= 1
        on = [
            self._left[lane] > 0 and token not in self._eos
            for lane, token in zip(lanes, tokens, strict=True)
        ]
        told_on = [token if goes else told.END for token, goes in zip(tokens, on, strict=True)]
        self._engine.send(np.array(told_on, np.int32))
        self._user.say("tokens", lanes=lanes, tokens=tokens)
        return [lane for lane, goes in zip(lanes, on, strict=True) if goes]

    def _drawn(self, logits: np.ndarray) -> list[int]:
        if self._sampling.greedy:
            return [int(token) for token in logits.argmax(axis=-1)]
        return [
            draw(self._sampling.distribution(row), float(self._prg.uniform(()))) for row in logits
        ]
