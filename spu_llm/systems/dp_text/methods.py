"""What a method of generating a text is to the driver, and InvisibleInk as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from dp_accounting import dp_event

from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.mechanism import clipped_sum, expanded_top_k, mean_logits, weights
from spu_llm.systems.dp_text.parameters import Parameters
from spu_llm.systems.dp_text.sampling import draw

HOLDS = "holds before anything is generated, whatever the references are"
# Of methods whose noise is that of `sampling.laplace` or `sampling.gaussian`.
HOLDS_BUT_FOR_ROUNDING = f"{HOLDS}; not accounted for is that its noise is rounded to float64"

# The next token from phi_pub [vocab] and phi_i [rows, vocab], float32 (B rows, or more where a
# method takes any number); None: the method gives no more.
Next = Callable[[np.ndarray, np.ndarray], int | None]


@dataclass(frozen=True)
class Method:
    """A way to generate texts from batches of references.

    begin(present, prg)  starts a text: bool [rows], False where a reference is null, and the stream
                         that all of its randomness is drawn from.
    event                what a text spends of the privacy of its own batch, whatever came of it;
                         one that no accountant supports where there is no guarantee.
    reads                whether it runs the model on references at all.
    any_number           whether a text may have more than B of them: each adds a term of its own,
                         and the sum is divided by B all the same.
    guarantee            in words; facts: its parameters, for the statement.
    """

    name: str
    batch: int
    max_new_tokens: int
    event: dp_event.DpEvent
    begin: Callable[[np.ndarray, Prg], Next]
    facts: dict[str, Any]
    guarantee: str = HOLDS
    reads: bool = True
    any_number: bool = False


def token_weights(
    parameters: Parameters, public: np.ndarray, private: np.ndarray, present: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the candidates V_k+ (int64 [m]) and what their probabilities are proportional to
    (float64 [m]), lines 3 to 5 of algorithm 1. public: phi_pub [vocab]; private: phi_i [B, vocab];
    present [B]; under add-or-remove both may have any number of rows.
    """
    p = parameters
    if len(private) != len(present) or (len(present) != p.batch and not p.any_number):
        raise ValueError(f"a batch has {p.batch} rows, nulls among them; got {len(private)}")
    candidates = expanded_top_k(public, p.top_k, p.clip, p.batch)
    own = public[candidates]
    total = clipped_sum(own, private[:, candidates], present, p.clip, centre=p.centre)
    return candidates, weights(own, mean_logits(own, total, p.batch), p.temperature)


def invisible_ink(parameters: Parameters, name: str = "invisibleink") -> Method:
    """Return algorithm 1 as a method. Of the end of a text it makes nothing special: an ordinary
    candidate.
    """

    def begin(present: np.ndarray, prg: Prg) -> Next:
        def token(public: np.ndarray, private: np.ndarray) -> int:
            candidates, chances = token_weights(parameters, public, private, present)
            return int(candidates[draw(chances, prg)])

        return token

    return Method(
        name,
        parameters.batch,
        parameters.max_new_tokens,
        parameters.text_event,
        begin,
        asdict(parameters),
        any_number=parameters.any_number,
    )


def full_vocabulary(parameters: Parameters) -> Method:
    """Return InvisibleInk with k = |V| as a method."""
    return invisible_ink(replace(parameters, top_k=None), "full-vocabulary")


def public_only(parameters: Parameters) -> Method:
    """Return the public model alone as a method: reads no reference, spends nothing. It is the
    limit of InvisibleInk for C to 0, with plain top-k.
    """
    p = replace(parameters, clip=0.0, centre=False)

    def begin(present: np.ndarray, prg: Prg) -> Next:
        def token(public: np.ndarray, private: np.ndarray) -> int:
            candidates = expanded_top_k(public, p.top_k, 0.0, 1)
            own = public[candidates]
            mean = mean_logits(own, np.zeros(len(own)), 1)
            return int(candidates[draw(weights(own, mean, p.temperature), prg)])

        return token

    facts = {
        "temperature": p.temperature,
        "top_k": p.top_k,
        "max_new_tokens": p.max_new_tokens,
        "batch": p.batch,
    }
    return Method(
        "public-only",
        p.batch,
        p.max_new_tokens,
        dp_event.NoOpDpEvent(),
        begin,
        facts,
        "references are not read",
        reads=False,
        any_number=True,
    )
