"""Decoding: one driver for both parties, standard (no drafts) or POST (drafts verified together).

`generate` is the protocol's main figure. It runs the same at client and provider, in plaintext,
in simulation and between two processes; `session.local(CLIENT, ...)` marks what only the client
does, on a `ClientSide` that the provider does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Array

from models import secure_gpt2
from models.draft import Drafter
from models.gpt2 import GPT2Config, Params, init_params
from models.request import Request
from models.tokenizer import StreamDecoder, Tokenizer
from protocols import post
from spu_llm.errors import WireError
from spu_llm.prg import Prg
from spu_llm.reveal import reveal
from spu_llm.secure import PartySession, SecureFunction, Session, public
from spu_llm.values import CLIENT, PROVIDER, Owner


@dataclass
class Report:
    """Counts of one completion, known to both parties; text and tokens are the client's."""

    steps: int = 0  # secure decoding steps, after the prefill
    drafted: int = 0
    accepted: int = 0
    emitted: list[int] = field(default_factory=list)  # tokens per secure step, prefill first
    finish_reason: str = ""


@dataclass
class ClientSide:
    """The client's plaintext half: prompt, drafting, sampling, text.

    `drafting` and `sampling` are keyed streams, the first for drafts, the second for acceptance and
    bonus draws; `on_text` receives text as soon as it is certain.
    """

    prompt: list[int]
    tokenizer: Tokenizer
    drafter: Drafter | None
    drafting: Prg
    sampling: Prg
    stop: list[str] = field(default_factory=list)
    on_text: Callable[[str], None] = lambda text: None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.tokenizer)
        self._shown = 0
        self._drafts: list[int] = []
        self._q = np.zeros((0, self.tokenizer.vocab_size))

    def propose(self, request: Request) -> None:
        """Draft in the clear (Algorithm 1, line 1)."""
        if request.draft_length == 0:
            return
        assert self.drafter is not None
        self._drafts, self._q = self.drafter.propose(
            self.prompt + self.tokens,
            request.draft_length,
            lambda: float(self.drafting.uniform(())),
            request.temperature,
            greedy=request.greedy,
        )

    def step_tokens(self) -> list[int]:
        """Input of the secure forward: the last token, not cached yet, and the drafts."""
        return [(self.prompt + self.tokens)[-1], *self._drafts]

    def thresholds(self) -> np.ndarray:
        """r_i q_i(d_i) with fresh uniform r (Algorithm 2, line 1)."""
        q_of_draft = self._q[np.arange(len(self._drafts)), self._drafts]
        return post.threshold(self.sampling.uniform((len(self._drafts),)), q_of_draft)

    def resolve(self, rejected: np.ndarray, row: np.ndarray, request: Request, limit: int) -> int:
        """Emit the accepted drafts and the bonus token; returns the number of accepted drafts."""
        k = int(post.first_rejection(rejected)) if rejected.size else 0
        p = post.distribution(row, greedy=request.greedy)
        q = self._q[k] if k < len(self._drafts) else None
        bonus = post.draw(post.next_distribution(p, q), float(self.sampling.uniform(())))
        self._emit([*self._drafts[:k], bonus], limit)
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


CLAMP_BELOW = 0.5  # temperature


@dataclass(frozen=True)
class Programs:
    """The secure functions of one completion and the public sizes they were built for."""

    config: GPT2Config
    request: Request
    secure: secure_gpt2.SecureGPT2
    limit: int
    capacity: int  # positions of the shared block, room for the last step's drafts included

    @staticmethod
    def build(config: GPT2Config, request: Request) -> Programs:
        request.check(config)
        limit = request.limit(config)
        capacity = request.prompt_tokens + limit + request.draft_length + 1
        # Logits of trained models spread over well under 128; colder, their quotient may not.
        clamp = not request.greedy and request.temperature < CLAMP_BELOW
        secure = secure_gpt2.build(config, capacity, greedy=request.greedy, clamp=clamp)
        return Programs(config, request, secure, limit, capacity)

    def prepare(self, session: PartySession, weights: Any) -> None:
        """Compile everything and agree with the peer on every program, before the first secret."""
        shape = jax.ShapeDtypeStruct
        prompt = shape((self.request.prompt_tokens,), np.int32)
        scalar, length = shape((), np.float32), shape((), np.int32)
        prefill = (weights, prompt, scalar, None)
        session.prepare(self.secure.prefill, *prefill)
        _, shared = jax.eval_shape(self.secure.prefill.fn, *_shapes(prefill))
        count = self.request.draft_length
        tokens, thresholds = shape((count + 1,), np.int32), shape((count,), np.float32)
        session.prepare(
            self.secure.decode, weights, tokens, thresholds, shared, length, scalar, None
        )
        session.prepare(announce, shape((2,), np.int32))


def _shapes(args: Any) -> Any:
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), args)


def share_weights(session: Session, config: GPT2Config, params: Params | None) -> Any:
    """The provider's weights as private values; the client, who has none, passes None."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    leaves, tree = jax.tree.flatten(shapes)
    held = jax.tree.leaves(params) if params is not None else [None] * len(leaves)
    values = [
        session.private(PROVIDER, functools.partial(np.asarray, w), s.shape, s.dtype)
        for s, w in zip(leaves, held, strict=True)
    ]
    return jax.tree.unflatten(tree, values)


def generate(
    session: Session,
    programs: Programs,
    weights: Any,
    client: ClientSide | None,
    on_step: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Complete the client's prompt with the provider's weights (POST, Algorithms 1 and 2).

    client learns: its text, and per step the rejection bits and one row of the distribution;
    provider learns: prompt length, draft length, steps, accepted count per step, when it ended.
    """
    request, limit = programs.request, programs.limit
    _declare(session, request)
    temperature = public(np.float32(1.0 if request.greedy else 1.0 / request.temperature))
    report = Report()

    def client_does(work: Callable[[ClientSide], Any]) -> Callable[[], Any]:
        def run() -> Any:
            assert client is not None
            return work(client)

        return run

    def finish_step(rejected: Any, row: Any, drafted: int) -> int:
        """The client emits tokens; both learn how many drafts stay and whether text goes on."""

        def resolve(c: ClientSide) -> list[int]:
            bits, p = session.get(rejected), session.get(row)
            assert bits is not None and p is not None
            return [c.resolve(bits, p, request, limit), int(bool(c.finish_reason))]

        progress = session.private(CLIENT, client_does(resolve), (2,), np.int32)
        seen = session.get(session.call(announce, progress))
        assert seen is not None
        accepted, ended = int(seen[0]), bool(seen[1])
        if not 0 <= accepted <= drafted:
            raise WireError(f"the client announces {accepted} of {drafted} drafts accepted")
        report.drafted += drafted
        report.accepted += accepted
        report.emitted.append(accepted + 1)
        if not ended and sum(report.emitted) >= limit:
            raise WireError(f"the client goes on after the agreed {limit} tokens")
        if ended:
            report.finish_reason = (
                session.local(CLIENT, client_does(lambda c: c.finish_reason)) or "ended by client"
            )
        on_step(report)
        return accepted

    # Prefill: the prompt's keys and values become shares; its last row gives the first token.
    with session.meter.in_phase("prefill"):
        prompt = session.private(
            CLIENT, client_does(lambda c: c.prompt), (request.prompt_tokens,), np.int32
        )
        row, shared = session.call(programs.secure.prefill, weights, prompt, temperature, None)
        no_bits = session.private(CLIENT, lambda: np.zeros(0, bool), (0,), np.bool_)
        finish_step(no_bits, row, drafted=0)  # emits the first token
        length = request.prompt_tokens

    # Decode: draft in the clear, verify all drafts in one secure forward, keep what was accepted.
    with session.meter.in_phase("decode"):
        count = request.draft_length
        while not report.finish_reason:
            session.local(CLIENT, client_does(lambda c: c.propose(request)))
            tokens = session.private(
                CLIENT, client_does(lambda c: c.step_tokens()), (count + 1,), np.int32
            )
            thresholds = session.private(
                CLIENT, client_does(lambda c: c.thresholds()), (count,), np.float32
            )
            rejected, row, shared = session.call(
                programs.secure.decode, weights, tokens, thresholds, shared,
                public(np.int32(length)), temperature, None,
            )  # fmt: skip
            report.steps += 1
            # Roll-back: rows of rejected drafts lie past the new length and are overwritten.
            length += 1 + finish_step(rejected, row, drafted=count)
    return report


def _declare(session: Session, request: Request) -> None:
    for learner in (CLIENT, PROVIDER):
        session.ledger.declare(learner, "model shape, vocabulary and context length")
    session.ledger.declare(CLIENT, f"functionality post: {post.FUNCTIONALITY.client}")
    session.ledger.declare(PROVIDER, f"functionality post: {post.FUNCTIONALITY.provider}")
    session.ledger.declare(PROVIDER, f"prompt length: {request.prompt_tokens} tokens")
    session.ledger.declare(PROVIDER, f"draft length: {request.draft_length}")
    session.ledger.declare(PROVIDER, "temperature and token limit")
