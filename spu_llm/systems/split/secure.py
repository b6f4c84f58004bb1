"""Mode mpc of split models: the middle on shares, everything else in the client's clear.

A step of n rows, after NOIR (section 2) with two-party computation in place of its noise:

  1. the client drafts; its front makes rows x [n, d] of the last token and the drafts;
  2. the middle runs on shares: x is the client's, the blocks are the provider's. The first norm
     sees x alone and is the client's own work, so that the first product is one masked message;
  3. one bit is opened to both, whether activations left their ranges; then the rows y [n, d] behind
     the middle to the client;
  4. the client's back makes logits of them, and the plain rule of speculative sampling
     (`protocols.verification.plain`) keeps drafts and draws the token after. The text has the whole
     model's distribution, up to what a forward on shares is off.

There is no noise and no tuning. Look-up, head and verification are not secure any more: they need
not be, since the ends are the client's.

Who learns what. The client: the tokens, and of every position, also of rejected drafts, the pair of
x and y. These are the middle's answers to questions of the client's choice: enough of them, and the
middle can be fitted to them. So this mode hides nothing of a provider's middle in the long run, and
of the ends nothing at all; it is for models whose weights need no secrecy, or whose provider limits
what a client may ask. y is opened in units of 2^-18 with the coin of its last truncation, which
says a few bits more of the sums that it was rounded from. The provider: lengths of prompt and
drafts, the number of steps, when the text ends, and whether activations left their ranges, which
ends it; with shown progress how many drafts stay. It does not learn how tokens are drawn.

Semi-honest. A client that deviates may bring rows x that no text has: those are questions like any
others. One that adds constants to its shares inside the forward gets answers of inner layers. A
provider that deviates, or serves another middle than it says, makes y, and so the text, wrong in a
way of its choice; what it sees of that is the number of steps, when the text ends, and with shown
progress which drafts stay: with false y it may choose what that depends on. So it may with the bit
of the ranges, which it states itself: with those, and with blocks made for it, the bit answers one
question of its choice a session, and the client judges its own x, at the first norm, by a range
that the provider stated. Nobody checks that the provider's middle belongs to the ends: the client
states a digest of its ends, and the provider compares it with that of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.ends import Ends
from models.hf import load_config, load_model
from models.tokenizer import Tokenizer
from protocols.verification.plain import Plain
from spu_llm.core.errors import InputError
from spu_llm.core.values import CLIENT
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.completion import complete, drafter_of, streams_of
from spu_llm.systems.decoding.generate import Completion
from spu_llm.systems.program import Job, Send
from spu_llm.systems.split.ends import check_same_shape
from spu_llm.systems.split.middle import Middle
from spu_llm.systems.split.secure_records import MiddleInputs, MiddleRequest


def run(session: PartySession, job: Job[MiddleRequest, MiddleInputs], send: Send) -> dict[str, Any]:
    """Run a completion: see `spu_llm.systems.decoding.completion.complete`. InputError at a client
    whose model is of another shape than the provider's.
    """
    if session.rank == CLIENT:
        check_same_shape(load_config(Path(job.client.model_dir)), job.model)
    return complete(session, job, send, _client_side)


def _client_side(inputs: MiddleInputs, completion: Completion, send: Send) -> ClientSide:
    return ClientSide(
        prompt=inputs.prompt,
        tokenizer=Tokenizer.load(Path(inputs.draft_dir)),
        drafter=drafter_of(inputs.draft_dir, completion),
        verifier=Plain(inputs.sampling),
        streams=streams_of(inputs.draft_seed, inputs.sampling_seed),
        stop=inputs.stop,
        on_text=lambda text, drafted: send("text", text=text, drafted=drafted),
        around=ends_of(load_model(Path(inputs.model_dir))[1], completion),
    )


def ends_of(params: Any, completion: Completion) -> Ends:
    """Make the client's ends for a completion, of a model with these parameters and of the ranges
    that the provider states.
    """
    layout, count = completion.layout, completion.request.step_rows
    if not isinstance(layout.part, Middle):
        raise InputError("the model is not split")
    ends = Ends(layout.config, params, layout.part.split, layout.live_rows + count)
    ends.rehearse(count, layout.prompts[0])
    return ends
