"""The program `shared-text`: texts from references of both parties, with a model that both have."""

from __future__ import annotations

from typing import Any

import jax

from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.dp_text.lanes import Lanes
from spu_llm.systems.dp_text.secure_budget import epsilon_of_text
from spu_llm.systems.dp_text.secure_records import PrivacyBudget, References, SharedRequest
from spu_llm.systems.dp_text.secure_run import check_prompts, counted, folded_of, result_of
from spu_llm.systems.dp_text.shared import OwnHalf, SharedText, declare
from spu_llm.systems.program import Job, Send

PHASES = ("offline", "draw")


def run(session: PartySession, job: Job[SharedRequest, References], send: Send) -> dict[str, Any]:
    """Draw one text for each batch of both parties' references; both parties' results have them."""
    config, request = job.model, job.request
    choice = request.choice(config, noises=2)
    own = session.rank == CLIENT
    count = request.batch - request.of_provider if own else request.of_provider
    if own:
        prompts = check_prompts(job.client.prompts, request, count)
    else:
        spendable = job.provider.served.read(PrivacyBudget)
        prompts = provider_prompts(spendable, request)
        check_budget(spendable, request, choice)
    weights = jax.device_put(folded_of(job))
    public = Lanes(config, weights, 1, len(request.query), request.max_new_tokens)
    private = Lanes(config, weights, count, request.room, request.max_new_tokens)
    drawn = SharedText(session, request, choice)
    with session.meter.in_phase("offline"):
        drawn.prepare()
    declare(session, request)
    stream = Prg.from_os()
    texts: list[list[int]] = []
    for number, batch in enumerate(prompts):
        send("stage", name=f"text {number + 1} of {request.texts}")
        half = OwnHalf(public, private, batch, lambda: choice.draw_noise(stream, request.places))
        client, provider = (half, None) if own else (None, half)
        ends = request.eos.__contains__
        texts.append(drawn.text(client, provider, ends, counted(send)))
    return result_of(session, texts, PHASES)


def provider_prompts(own: PrivacyBudget | None, request: SharedRequest) -> list[list[list[int]]]:
    """Return the provider's prompts of all texts, each of references of its own; InputError where
    there are not so many.
    """
    count, texts = request.of_provider, request.texts
    references = [] if own is None else own.references
    if not 0 < texts <= -(-len(references) // count):
        raise InputError(
            f"the provider has {len(references)} references, of which {texts} texts would read "
            f"{count} each"
        )
    rows = [request.prompt_of(reference) for reference in references]
    rows += [[] for _ in range(-len(rows) % count)]
    return [rows[i * count : (i + 1) * count] for i in range(texts)]


def check_budget(own: PrivacyBudget | None, request: SharedRequest, choice: Any) -> None:
    """Raise InputError when a text would spend more than the provider gives."""
    assert own is not None
    asked = epsilon_of_text(choice, request.places, request.max_new_tokens, own.delta)
    if asked > own.epsilon:
        raise InputError(
            f"such a text spends epsilon {asked:.4g} at delta {own.delta:g} of the provider's "
            f"references, who gives {own.epsilon:g}; ask for fewer tokens or a lower epsilon"
        )
