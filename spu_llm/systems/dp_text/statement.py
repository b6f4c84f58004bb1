"""The privacy statement that goes with a corpus: what is promised, of what, and what is public."""

from __future__ import annotations

from typing import Any

from dp_accounting import dp_event
from dp_accounting.privacy_accountant import UnsupportedEventError

from spu_llm.systems.dp_text.accounting import (
    ADD_OR_REMOVE,
    DisjointDpEvent,
    loose_epsilon_of,
    total,
)

MEANING = {
    "replace-by-null": "one reference is there, or an empty one in its place",
    "zero-out": "one reference is there, or one in its place with which all logits are 0",
    "replace-one": "one reference is there, or any other one in its place",
    ADD_OR_REMOVE: "one reference is there, or is not",
}
_PARAMETERS = "the model and its tokenizer, the query, every parameter of this statement"
_BATCHES = (
    "how many references there are and which of them make a batch (their places in the file), and "
    "their labels, where there are any"
)
_DEALT = (
    "the rule by which a reference's own words say to which text it belongs; equal references "
    "belong to one"
)
_TEXTS = "all texts, their number, and the length of each"
NOT_PROTECTED = (
    "what the model knows of the references from its training",
    "how long a run took, and that it was run",
    "a person in several references: g in batches of their own count g rho together, g in one "
    "batch g^2 rho; all are in one for a method without batches",
    "references that further runs read too: rho of every run adds up, also of one that begins anew "
    "where its files were lost, or put back as they were before",
    "parameters, if they were chosen by looking at the references or at what came of them",
    "from whoever breaks the cipher (AES-256) that draws are made from",
)


def statement(
    *,
    name: str,
    event: dp_event.DpEvent,
    guarantee: str,
    facts: dict[str, Any],
    adjacency: str,
    delta: float,
    texts: int,
    run: dict[str, Any],
) -> dict[str, Any]:
    """Make the statement as JSON has it. event: of one text, whose batch no other text reads.
    epsilon is that of the event, whatever was asked for; None where nothing is guaranteed.
    """
    spent: dict[str, float | None]
    try:
        accountant = total([DisjointDpEvent((event,) * texts)], adjacency)
        rho = accountant.rho
        spent = {
            "rho": rho,
            "epsilon": accountant.get_epsilon(delta),
            "delta": delta,
            "epsilon_loose": loose_epsilon_of(rho, delta),
        }
    except UnsupportedEventError:
        spent = {"rho": None, "epsilon": None, "delta": delta, "epsilon_loose": None}
    return {
        "method": name,
        "guarantee": guarantee,
        "adjacency": adjacency,
        "adjacency_means": MEANING[adjacency],
        **spent,
        "unit": "one reference, a line of the file",
        "parameters": facts,
        "run": run,
        "public": [_PARAMETERS, _DEALT if adjacency == ADD_OR_REMOVE else _BATCHES, _TEXTS],
        "not_protected": list(NOT_PROTECTED),
    }


def spends_of(promised: dict[str, Any]) -> dict[str, Any]:
    """Return what a statement says of a reference whose text was begun."""
    return {name: promised[name] for name in ("rho", "epsilon", "delta", "adjacency")}


def summary(promised: dict[str, Any]) -> str:
    """Return a line of a statement, for people."""
    if promised["epsilon"] is None:
        return f"{promised['method']}: {promised['guarantee']}"
    return (
        f"{promised['method']}: epsilon {promised['epsilon']:.4g} at delta {promised['delta']:g} "
        f"(rho {promised['rho']:.4g}), {promised['adjacency']}: {promised['adjacency_means']}"
    )
