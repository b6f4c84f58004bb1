"""Decoding: one driver for both parties, standard (no drafts) or POST (drafts verified together).

`generate` is the protocol's main figure: schedule, step, resolve. It runs the same at client and
provider, in plaintext, in simulation and between two processes; `session.local(CLIENT, ...)` marks
what only the client does, on a `ClientSide` that the provider does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import Array

from models.family import ModelConfig
from protocols.verification.variants import Verifier
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import InputError, WireError
from spu_llm.core.prg import Prg
from spu_llm.core.reveal import reveal
from spu_llm.core.settings import OWN
from spu_llm.core.values import CLIENT, PROVIDER, Owner, Public
from spu_llm.runtime.session import Session
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs, Retained, VerificationResult
from spu_llm.systems.decoding.judges import Judge, RowsJudge
from spu_llm.systems.decoding.request import GenerationRequest
from spu_llm.systems.decoding.secure_model import share_text
from spu_llm.systems.decoding.session_shape import SessionShape, Text
from spu_llm.systems.program import SystemPromptShape


@dataclass
class Report:
    """Counts of one completion; with hidden progress, `accepted` and `emitted` are the client's."""

    steps: int = 0  # secure decoding steps, after the prefill
    drafted: int = 0
    accepted: int = 0
    emitted: list[int] = field(default_factory=list)  # tokens per step, prefill first
    finish_reason: str = ""


@dataclass(frozen=True)
class Completion:
    """A request to a model: the judge that it asks for, the most tokens, and public sizes."""

    request: GenerationRequest
    judge: Judge
    limit: int
    layout: SessionShape

    @staticmethod
    def of(
        config: ModelConfig,
        request: GenerationRequest,
        before: SystemPromptShape = SystemPromptShape(),
        backend: str = OWN,
    ) -> Completion:
        """Return the completion of a request to a model, whose forwards `backend` computes. Raise
        InputError when the request does not fit the model, after the provider's own text.
        """
        if config.encodes and before.rows:
            raise InputError(f"nothing comes before what a {config.title} model reads")
        left = before.left(config)
        request.check(left)
        request.check_before(before)
        prefix = before.rows + len(request.public_prefix)
        layout = replace(
            layout_of(left, request),
            config=config,
            sizes=request.sizes(left, prefix),
            prefix=prefix,
            padded=before.padded,
            public=len(request.public_prefix),
            backend=backend,
        )
        return Completion(request, request.judge(config), request.limit(left), layout)

    @property
    def verifier(self) -> Verifier:
        """Return the judge, where it verifies drafts on shares."""
        assert not isinstance(self.judge, RowsJudge)
        return self.judge

    def text(self, session: Session, system_prompt: Sequence[int] = ()) -> Text | None:
        """Return what stands before the prompt, as values of `session`; the provider has
        `system_prompt`.
        """
        return share_text(session, self.layout, [*self.request.public_prefix, *system_prompt])

    def decoder(self, session: Session, weights: Any, text: Text | None = None) -> Decoder:
        """Return a decoder in `session`, after the text that `Completion.text` gave."""
        return Decoder(session, self.layout, self.judge, weights, text)

    def prepare(self, session: Session, decoder: Decoder) -> None:
        """Compile everything and agree with the peer on every program, before the first secret."""
        decoder.prepare([self.request.step_rows])
        announcement = announce_end if self.request.hide_progress else announce
        session.prepare(announcement, jax.ShapeDtypeStruct(self.announced, np.int32))

    @property
    def announced(self) -> tuple[int]:
        """Return the shape of what the client announces after a step."""
        return (1,) if self.request.hide_progress else (2,)


def layout_of(config: ModelConfig, request: GenerationRequest) -> SessionShape:
    """Return the public sizes of a completion."""
    return SessionShape(
        config,
        prompts=(request.prompt_tokens,),
        sizes=request.sizes(config),
        live_rows=request.live_rows(config),
        hidden=request.hide_progress,
        packs=request.may_pack(config),
        branches=request.candidates,
        scale=request.logits_scale,
        part=request.part,
    )


def _announce(progress: Array) -> Array:
    return reveal(progress, to=Owner.PUBLIC, label="accepted drafts and end of text")


announce = SecureFunction(_announce, (Owner.CLIENT,), "announce")


def _announce_end(ended: Array) -> Array:
    return reveal(ended, to=Owner.PUBLIC, label="end of text")


announce_end = SecureFunction(_announce_end, (Owner.CLIENT,), "announce end")


def generate(
    session: Session,
    completion: Completion,
    decoder: Decoder,
    client: ClientSide | None,
    provider: Prg | None,
    on_step: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Complete the client's prompt with the provider's weights (POST, Algorithms 1 and 2).

    `client` and `provider` are what each party alone has: its plaintext half, and its stream of
    secrets for joint randomness; None at the other one. What the parties learn is the judge's
    functionality, the prompt's length, the request's public fields, the length of the provider's
    own text before the prompt, rounded up, and when the text ended.

    While a forward runs, the session may make what the step after it takes, if one may follow: the
    text's limit and the number of steps tell, or with shown progress the number of tokens, and
    nothing else does. So the last forward has none beside it only where both parties know that it
    is; after a text that ends before, some of it was for nothing.
    """
    request = completion.request
    declare(session, completion)
    if request.hide_progress:
        length = len(request.public_prefix) + request.prompt_tokens
        session.local(
            CLIENT, ClientSide.keep_time, client, request.draft_length, completion.limit, length
        )

    def prefill(inputs: JudgeInputs, then: int | None) -> VerificationResult:
        prompt = rows_of_client(
            session, completion, client, request.prompt_tokens, ClientSide.prefill_input
        )
        return decoder.prefill(prompt, inputs, then)

    report, _ = answer(session, completion, decoder, client, provider, prefill, on_step)
    session.stop_prefetching()
    return report


def answer(
    session: Session,
    completion: Completion,
    decoder: Decoder,
    client: ClientSide | None,
    provider: Prg | None,
    prefill: Callable[[JudgeInputs, int | None], VerificationResult],
    on_step: Callable[[Report], None],
) -> tuple[Report, Retained]:
    """Write a text to its end, after `prefill(inputs, rows of the step that may follow)`; return
    its report, and which rows of the last step would stay. What the parties put in and learn, see
    `generate`.
    """
    request, report = completion.request, Report()
    count = request.step_rows

    # Prefill: the prompt's keys and values become shares; its last row gives the first token.
    with session.meter.in_phase("prefill"):
        session.local(CLIENT, ClientSide.propose, client, 0)
        inputs = decoder.inputs(1, provider, ClientSide.verifier_inputs, client)
        judged = prefill(inputs, _following(completion, 0))
        retained = _resolve(session, completion, client, judged, 0, report)
        on_step(report)

    # Decode: verify all drafts in one secure forward, keep what was accepted, draft in the clear.
    with session.meter.in_phase("decode"):
        while not report.finish_reason:
            rows = rows_of_client(session, completion, client, count, ClientSide.step_input)
            inputs = decoder.inputs(count, provider, ClientSide.verifier_inputs, client)
            written = report.steps + 1 if request.hide_progress else sum(report.emitted)
            judged = decoder.step(rows, inputs, retained, _following(completion, written))
            report.steps += 1
            retained = _resolve(session, completion, client, judged, count - 1, report)
            on_step(report)
    return report, retained


def rows_of_client(
    session: Session,
    completion: Completion,
    client: ClientSide | None,
    count: int,
    work: Callable[..., Any],
    *args: Any,
) -> Any:
    """Put in the client's `count` rows, which work(client, *args) gives, as its private value."""
    given = completion.layout.rows_in(count)
    return session.private(CLIENT, work, given.shape, given.dtype, client, *args)


def _following(completion: Completion, written: int) -> int | None:
    """Return the rows of the step that may follow the next forward, by what both parties know:
    `written` tokens are there, at least, and the forward brings one or more. None when the text
    then has its length.
    """
    return completion.request.step_rows if written + 1 < completion.limit else None


def _resolve(
    session: Session,
    completion: Completion,
    client: ClientSide | None,
    judged: VerificationResult,
    drafted: int,
    report: Report,
) -> Retained:
    """Have the client emit tokens and draft the next step's; both learn whether text goes on, and
    which rows stay where the provider may know it. Return which rows stay. Raise WireError for what
    no honest client announces.
    """
    limit, hidden = completion.limit, completion.request.hide_progress
    seen = jax.tree.map(session.get, judged.outcome)
    local = session.alone if hidden else session.local
    settled = local(CLIENT, ClientSide.settle, client, seen, limit, completion.request.draft_length)
    progress = session.private(CLIENT, _progress, completion.announced, np.int32, settled, hidden)
    heard = session.get(session.call(announce_end if hidden else announce, progress))
    assert heard is not None
    if hidden:
        retained = settled[0] if settled is not None else None
    else:
        stay = int(heard[0])
        known = judged.accepted.value[0] if isinstance(judged.accepted, Public) else stay
        if not 0 <= stay <= drafted or known != stay:
            raise WireError(f"the client announces {stay} of {drafted} drafts accepted")
        retained = np.arange(drafted + 1) <= stay
    report.drafted += drafted
    if retained is not None:
        report.emitted.append(int(retained.sum()))
        report.accepted += report.emitted[-1] - 1
    written = max(sum(report.emitted), report.steps + 1)
    if not heard[-1] and written >= limit:
        raise WireError(f"the client goes on after the agreed {limit} tokens")
    if heard[-1]:
        # The client alone knows why.
        report.finish_reason = client.finish_reason if client is not None else "ended by client"
    return retained[None] if retained is not None else None


def _progress(settled: tuple[np.ndarray, bool], hidden: bool) -> list[int]:
    """Return what the client announces: how many drafts stay, unless hidden, and whether the text
    ends.
    """
    retained, ended = settled
    return [int(ended)] if hidden else [int(retained.sum()) - 1, int(ended)]


def declare(session: Session, completion: Completion) -> None:
    request = completion.request
    functionality = request.functionality
    for learner in (CLIENT, PROVIDER):
        session.ledger.declare(learner, "model shape, vocabulary and context length")
    layout = completion.layout
    if own := layout.prefix - layout.public:
        session.ledger.declare(CLIENT, f"length of the provider's own text, padded: {own} tokens")
    if layout.padded and layout.hidden and layout.backend == OWN:
        # A hint of a table of positions is of one length (`models.gpt2.embed`).
        session.ledger.declare(CLIENT, "whether that text is as long as in an earlier session")
    if layout.public:
        session.ledger.declare(PROVIDER, f"the public prefix, {layout.public} tokens")
    name = f"functionality {completion.judge.name}"
    session.ledger.declare(CLIENT, f"{name}: {functionality.client}")
    session.ledger.declare(PROVIDER, f"{name}: {functionality.provider}")
    if not request.begins_later:
        session.ledger.declare(PROVIDER, f"prompt length: {request.prompt_tokens} tokens")
    session.ledger.declare(PROVIDER, f"draft length: {request.draft_length}")
    if request.candidates > 1:
        session.ledger.declare(PROVIDER, f"number of candidates: {request.candidates}")
    session.ledger.declare(PROVIDER, request.told)
    if layout.backend == OWN:
        for learner in (CLIENT, PROVIDER):
            session.ledger.declare(learner, "whether activations left their ranges, which ends it")
        session.ledger.declare(PROVIDER, "whether the client had the weights' hint already")
    session.ledger.declare(CLIENT, "ranges of the model's activations, by powers of two")
    for words in layout.public_weights.values():
        session.ledger.declare(CLIENT, words)
    if layout.config.public_rows:
        session.ledger.declare(CLIENT, "how many first tokens of a text these do not hold for")
