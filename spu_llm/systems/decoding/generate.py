"""Decoding: one driver for both parties, standard (no drafts) or POST (drafts verified together).

`generate` is the protocol's main figure. It runs the same at client and provider, in plaintext,
in simulation and between two processes; `session.local(CLIENT, ...)` marks what only the client
does, on a `ClientSide` that the provider does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import Array

from models.draft import Drafter
from models.gpt2 import GPT2Config, Params, fold, init_params
from models.ranges import check_ranges
from models.tokenizer import StreamDecoder, Tokenizer
from protocols.verification import variants as verification
from protocols.verification.distribution import Streams
from protocols.verification.variants import Verifier
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import WireError
from spu_llm.core.prg import Prg
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Owner, Public, public
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import Session
from spu_llm.systems.decoding import secure_model as secure_gpt2
from spu_llm.systems.decoding.cadence import Cadence
from spu_llm.systems.decoding.request import Request


@dataclass
class Report:
    """Counts of one completion; with hidden progress, `accepted` and `emitted` are the client's."""

    steps: int = 0  # secure decoding steps, after the prefill
    drafted: int = 0
    accepted: int = 0
    emitted: list[int] = field(default_factory=list)  # tokens per step, prefill first
    finish_reason: str = ""


@dataclass
class ClientSide:
    """The client's plaintext half: prompt, drafting, sampling, text.

    `on_text` receives text as soon as it is certain.
    """

    prompt: list[int]
    tokenizer: Tokenizer
    drafter: Drafter | None
    verifier: Verifier
    streams: Streams
    stop: list[str] = field(default_factory=list)
    on_text: Callable[[str], None] = lambda text: None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    cadence: Cadence | None = None  # of what the provider sees of a step

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.tokenizer)
        self._shown = 0
        self._drafts: list[int] = []
        self._q = np.zeros((0, self.tokenizer.vocab_size))
        self._rows = [True] * len(self.prompt)  # of the cache: which hold the text

    def propose(self, count: int) -> None:
        """Draft in the clear (POST, Algorithm 1, line 1)."""
        self._drafts, self._q = [], np.zeros((0, self._q.shape[1]))
        if count:
            self._drafts, self._q = self._draft(self.prompt + self.tokens, count, self.streams)

    def _draft(
        self, text: list[int], count: int, streams: Streams
    ) -> tuple[list[int], np.ndarray]:
        assert self.drafter is not None
        return self.drafter.propose(
            text,
            count,
            lambda logits, position: self.verifier.propose(logits, position, streams),
        )

    def keep_time(self, count: int) -> None:
        """Set the cadence of steps with `count` drafts, by drafts after a text of zeros."""
        streams = Streams(Prg.from_os(), Prg.from_os())
        self.cadence = Cadence.of(lambda: self._draft([0] * len(self.prompt), count, streams))

    def step_tokens(self) -> list[int]:
        """Input of the secure forward: the last token, not cached yet, and the drafts."""
        return [(self.prompt + self.tokens)[-1], *self._drafts]

    def kept_rows(self, count: int) -> np.ndarray:
        """Which rows hold the text, int32 [count], -1 after the last; they are the first ones now.
        Of a block that is packed.
        """
        kept = np.flatnonzero(self._rows)
        self._rows = [i < kept.size for i in range(count)]
        return np.pad(kept.astype(np.int32), (0, count - kept.size), constant_values=-1)

    def place(self, positions: int, context: int) -> secure_gpt2.Place:
        """Where the step's tokens stand, for a block of `positions` rows."""
        start = len(self.prompt) + len(self.tokens) - 1
        places = np.minimum(start + np.arange(len(self._drafts) + 1), context - 1)
        visible = np.zeros(positions, bool)
        visible[: len(self._rows)] = self._rows
        return secure_gpt2.Place(places, visible)

    def verifier_input(self) -> Any:
        """The client's input to the verifier."""
        position = len(self.prompt) + len(self.tokens)
        return self.verifier.client_input(self._drafts, self._q, position, self.streams)

    def resolve(self, outcome: Any, limit: int) -> int:
        """Emit the accepted drafts and the token after; returns the number of accepted drafts."""
        k, token = self.verifier.resolve(
            outcome, self._drafts, self._q, lambda: float(self.streams.sampling.uniform(()))
        )
        if self.tokens:  # after the prefill, whose rows are the prompt's
            self._rows += [i <= k for i in range(len(self._drafts) + 1)]
        self._emit([*self._drafts[:k], token], limit)
        return k

    def _emit(self, tokens: list[int], limit: int) -> None:
        for token in tokens:
            if token == self.tokenizer.eos_id:
                self.finish_reason = "eos"
                break
            self.tokens.append(token)
            self.text += self._decoder.push([token])
            if self._cut_at_stop():
                self.finish_reason = "stop"
                break
            if len(self.tokens) >= limit:
                self.finish_reason = "length"
                break
        if self.finish_reason and self.finish_reason != "stop":
            self.text += self._decoder.finish()
            self._cut_at_stop()
        self._show(len(self.text) if self.finish_reason else self._certain())

    def _cut_at_stop(self) -> bool:
        found = [i for s in self.stop if (i := self.text.find(s)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def _certain(self) -> int:
        """Length of text that no stop string can still take back."""
        held = 0
        for s in self.stop:
            for n in range(1, len(s)):
                if self.text.endswith(s[:n]):
                    held = max(held, n)
        return len(self.text) - held

    def _show(self, end: int) -> None:
        if end > self._shown:
            self.on_text(self.text[self._shown : end])
            self._shown = end


def _announce(progress: Array) -> Array:
    return reveal(progress, to=Owner.PUBLIC, label="accepted drafts and end of text")


announce = SecureFunction(_announce, (Owner.CLIENT,), "announce")


def _announce_end(ended: Array) -> Array:
    return reveal(ended, to=Owner.PUBLIC, label="end of text")


announce_end = SecureFunction(_announce_end, (Owner.CLIENT,), "announce end")


@dataclass(frozen=True)
class Programs:
    """The secure functions of one completion and the public sizes they were built for."""

    config: GPT2Config
    request: Request
    verifier: Verifier
    secure: secure_gpt2.SecureGPT2
    limit: int
    sizes: tuple[int, ...]  # rows of the shared cache block, which grows
    live_rows: int  # that hold text at most

    @staticmethod
    def build(config: GPT2Config, request: Request) -> Programs:
        request.check(config)
        limit = request.limit(config)
        sizes = request.sizes(config)
        sampling = replace(request.sampling, logit_spread=config.logit_spread)
        verifier = verification.verifier(
            request.verify, sampling, hide_progress=request.hide_progress
        )
        secure = secure_gpt2.build(config, sizes[0], verifier, request.logits_scale)
        live = request.live_rows(config)
        return Programs(config, request, verifier, secure, limit, sizes, live)

    def prepare(self, session: PartySession, weights: Any) -> None:
        """Compile everything and agree with the peer on every program, before the first secret."""
        prefill = self.prefill_shapes(weights)
        session.prepare(self.secure.prefill, *prefill)
        _, _, shared = jax.eval_shape(self.secure.prefill.fn, *_shapes(prefill))
        shape = jax.ShapeDtypeStruct

        def run(function: SecureFunction, *args: Any) -> Any:
            session.prepare(function, *args)
            return jax.eval_shape(function.fn, *_shapes(args))

        for size in self.sizes:
            if size > shared.positions:
                shared = run(secure_gpt2.lengthen(size), shared)
            decode = self.decode_shapes(weights, shared, shape((), np.int32))
            session.prepare(self.secure.decode, *decode)
        if self.request.may_pack(self.config):
            run(secure_gpt2.pack(self.sizes[-1]), self.kept_shapes(), shared)
        if self.request.hide_progress:
            session.prepare(announce_end, shape((1,), np.int32))
        else:
            session.prepare(announce, shape((2,), np.int32))

    def with_room(
        self, run: Callable[..., Any], shared: Any, length: int, kept: Callable[[], Any]
    ) -> tuple[Any, int]:
        """A block with room for a step after `length` rows, and the rows that it then has: the same
        block, a longer one, or, when it is full, one packed by the rows `kept()` of the client's
        choice. `run(function, *args)` runs what that takes.
        """
        needed = length + self.request.draft_length + 1
        if needed <= shared.positions:
            return shared, length
        for size in self.sizes:
            if needed <= size:
                return run(secure_gpt2.lengthen(size), shared), length
        return run(secure_gpt2.pack(self.sizes[-1]), kept(), shared), self.live_rows

    def prefill_shapes(self, weights: Any) -> tuple[Any, ...]:
        """Arguments of the prefill, with shapes for what the parties put in."""
        prompt = jax.ShapeDtypeStruct((self.request.prompt_tokens,), np.int32)
        return (weights, prompt, *self._verifier_shapes(0), None)

    def decode_shapes(self, weights: Any, shared: Any, length: Any) -> tuple[Any, ...]:
        """Arguments of a decode step, likewise."""
        count = self.request.draft_length
        tokens = jax.ShapeDtypeStruct((count + 1,), np.int32)
        inputs = self._verifier_shapes(count)
        place = self.place_shapes(shared.positions)
        return (weights, tokens, place, *inputs, shared, length, None)

    def place_shapes(self, positions: int) -> secure_gpt2.Place | None:
        """Shapes of the client's secret place, if it is one, for a block of `positions` rows."""
        if not self.request.hide_progress:
            return None
        shape = jax.ShapeDtypeStruct
        return secure_gpt2.Place(
            shape((self.request.draft_length + 1,), np.int32), shape((positions,), np.bool_)
        )

    def kept_shapes(self) -> Any:
        """Shape of the client's choice of rows to keep."""
        return jax.ShapeDtypeStruct((self.live_rows,), np.int32)

    def _verifier_shapes(self, drafts: int) -> tuple[Any, Any]:
        vocab = self.config.vocab_size
        return self.verifier.client_shapes(drafts, vocab), self.verifier.provider_shapes(drafts)


def _shapes(args: Any) -> Any:
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), args)


def share_weights(session: Session, config: GPT2Config, params: Params | None) -> Any:
    """The provider's weights, folded (`models.gpt2.fold`), as private values; the client, who has
    none, passes None. InputError at the provider when activations may leave their ranges.
    """
    shapes = jax.eval_shape(lambda: fold(init_params(config, jax.random.key(0)), config))
    leaves, tree = jax.tree.flatten(shapes)
    held: list[Any] = []
    if params is not None:
        folded = fold(params, config)
        check_ranges(folded, config)
        held = jax.tree.leaves(folded)
    values = [
        session.private(PROVIDER, functools.partial(np.asarray, w), s.shape, s.dtype)
        for s, w in zip(leaves, held or [None] * len(leaves), strict=True)
    ]
    return jax.tree.unflatten(tree, values)


def generate(
    session: Session,
    programs: Programs,
    weights: Any,
    client: ClientSide | None,
    provider: Prg | None,
    on_step: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Complete the client's prompt with the provider's weights (POST, Algorithms 1 and 2).

    `client` and `provider` are what each party alone has: its plaintext half, and its stream of
    secrets for joint randomness; None at the other one. What the parties learn is the verifier's
    functionality, the prompt's length, the request's public fields and when the text ended.
    """
    request, limit, verifier = programs.request, programs.limit, programs.verifier
    _declare(session, request)
    report = Report()

    def client_does(work: Callable[[ClientSide], Any]) -> Callable[[], Any]:
        def run() -> Any:
            assert client is not None
            return work(client)

        return run

    def call(function: SecureFunction, *args: Any) -> Any:
        # What a step takes is made in one go before it, so that nothing is made inside it.
        session.make_ready(function, *args)
        return session.call(function, *args)

    def verifier_inputs(drafts: int) -> tuple[Any, Any]:
        def secrets() -> Any:
            assert provider is not None
            return verifier.provider_input(drafts, provider)

        shapes = verifier.client_shapes(drafts, programs.config.vocab_size)
        mine = private_tree(session, CLIENT, client_does(lambda c: c.verifier_input()), shapes)
        theirs = private_tree(session, PROVIDER, secrets, verifier.provider_shapes(drafts))
        return mine, theirs

    def finish_step(outcome: Any, accepted: Any, drafted: int) -> int:
        """The client emits tokens and drafts the next step's; both learn whether text goes on, and
        how many drafts stay (-1 where the provider may not know). Where it may not, what the client
        does here takes a time that says nothing.
        """

        def resolve(c: ClientSide) -> tuple[int, int]:
            if c.cadence is not None:
                c.cadence.begin()
            k = c.resolve(jax.tree.map(session.get, outcome), limit)
            if not c.finish_reason:
                c.propose(request.draft_length)
            if c.cadence is not None:
                c.cadence.wait()
            return k, int(bool(c.finish_reason))

        done = session.local(CLIENT, client_does(resolve))
        if request.hide_progress:
            said = session.private(CLIENT, lambda: done[1:], (1,), np.int32)  # type: ignore[index]
            seen = session.get(session.call(announce_end, said))
            stay = done[0] if done is not None else -1
        else:
            said = session.private(CLIENT, lambda: done, (2,), np.int32)
            seen = session.get(session.call(announce, said))
            assert seen is not None
            stay = int(seen[0])
            known = accepted.value if isinstance(accepted, Public) else None
            if not 0 <= stay <= drafted or (known is not None and int(known) != stay):
                raise WireError(f"the client announces {stay} of {drafted} drafts accepted")
        assert seen is not None
        report.drafted += drafted
        if stay >= 0:
            report.accepted += stay
            report.emitted.append(stay + 1)
        written = max(sum(report.emitted), report.steps + 1)
        if not seen[-1] and written >= limit:
            raise WireError(f"the client goes on after the agreed {limit} tokens")
        if seen[-1]:
            report.finish_reason = (
                session.local(CLIENT, client_does(lambda c: c.finish_reason)) or "ended by client"
            )
        on_step(report)
        return stay

    def kept_rows() -> Any:
        rows = programs.live_rows
        kept = client_does(lambda c: c.kept_rows(rows))
        return session.private(CLIENT, kept, (rows,), np.int32)

    def place_in(positions: int) -> Any:
        place = client_does(lambda c: c.place(positions, programs.config.n_positions))
        return private_tree(session, CLIENT, place, programs.place_shapes(positions))

    if request.hide_progress:
        session.local(CLIENT, client_does(lambda c: c.keep_time(request.draft_length)))

    # Prefill: the prompt's keys and values become shares; its last row gives the first token.
    with session.meter.in_phase("prefill"):
        prompt = session.private(
            CLIENT, client_does(lambda c: c.prompt), (request.prompt_tokens,), np.int32
        )
        session.local(CLIENT, client_does(lambda c: c.propose(0)))
        outcome, accepted, shared = call(
            programs.secure.prefill, weights, prompt, *verifier_inputs(0), None
        )
        finish_step(outcome, accepted, drafted=0)  # emits the first token
        length = request.prompt_tokens

    # Decode: verify all drafts in one secure forward, keep what was accepted, draft in the clear.
    with session.meter.in_phase("decode"):
        count = request.draft_length
        while not report.finish_reason:
            tokens = session.private(
                CLIENT, client_does(lambda c: c.step_tokens()), (count + 1,), np.int32
            )
            shared, length = programs.with_room(call, shared, length, kept_rows)
            place = place_in(shared.positions)
            outcome, accepted, shared = call(
                programs.secure.decode, weights, tokens, place, *verifier_inputs(count), shared,
                public(np.int32(length)), None,
            )  # fmt: skip
            report.steps += 1
            stay = finish_step(outcome, accepted, drafted=count)
            # Roll-back: rows of rejected drafts lie past the new length and are overwritten; where
            # nobody may see how many there are, they stay, and the client hides them.
            length += 1 + (count if request.hide_progress else stay)
    return report


def private_tree(session: Session, owner: int, work: Callable[[], Any], shapes: Any) -> Any:
    """`work()` at `owner`, a tree of arrays of these shapes, as private values of the session."""
    leaves, tree = jax.tree.flatten(shapes)
    if not leaves:
        return shapes
    made = session.local(owner, lambda: jax.tree.leaves(work())) or [None] * len(leaves)
    values = [
        session.private(owner, functools.partial(np.asarray, x), s.shape, s.dtype)
        for x, s in zip(made, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, values)


def _declare(session: Session, request: Request) -> None:
    functionality = verification.functionality(
        request.verify, hide_progress=request.hide_progress
    )
    for learner in (CLIENT, PROVIDER):
        session.ledger.declare(learner, "model shape, vocabulary and context length")
    name = f"functionality {request.verify}"
    session.ledger.declare(CLIENT, f"{name}: {functionality.client}")
    session.ledger.declare(PROVIDER, f"{name}: {functionality.provider}")
    session.ledger.declare(PROVIDER, f"prompt length: {request.prompt_tokens} tokens")
    session.ledger.declare(PROVIDER, f"draft length: {request.draft_length}")
    session.ledger.declare(PROVIDER, "temperature, top-k, top-p and token limit")
    for learner in (CLIENT, PROVIDER):
        session.ledger.declare(learner, "whether activations left their ranges, which ends it")
    session.ledger.declare(CLIENT, "ranges of the model's activations, by powers of two")
    session.ledger.declare(PROVIDER, "whether the client had the weights' hint already")
