"""What a text drawn between two parties spends: the noise is whole numbers within bounds
(`protocols.dp.noise`), so it is a little more than `parameters` says, and a little of delta.
"""

from __future__ import annotations

import math

from dp_accounting import dp_event

from protocols.dp.choice import Choice
from spu_llm.core.errors import InputError
from spu_llm.systems.dp_text.accounting import (
    ApproximateDpEvent,
    BoundedRangeDpEvent,
    epsilon_of,
    total,
)
from spu_llm.systems.dp_text.parameters import Parameters

ANY_SPREAD = 1.0  # of phi_pub: what is spent does not depend on it
_OF_DELTA = 1e-3  # the part of delta that is kept for the bounds of the noise
_MOST = 500.0  # no epsilon of a statement is larger


def text_event(choice: Choice, places: int, tokens: int, delta: float) -> dp_event.DpEvent:
    """Return what `tokens` draws among `places` candidates each spend, for statements at `delta` or
    above: a distribution in zCDP, and how far the bounds of the noise put each draw from it.
    """
    loss = choice.loss(places)
    distribution = BoundedRangeDpEvent(math.sqrt(8 * loss.rho))
    # What a statement says at most, where the bounds take no more than they may.
    most = epsilon_of(tokens * distribution.rho, (1 - _OF_DELTA) * delta)
    one = loss.delta(1, min(most, _MOST))
    if tokens * one > _OF_DELTA * delta:
        return dp_event.NonPrivateDpEvent()
    return dp_event.SelfComposedDpEvent(
        ApproximateDpEvent(distribution, loss.total_variation), tokens
    )


def epsilon_of_text(choice: Choice, places: int, tokens: int, delta: float) -> float:
    """Return epsilon of a text of `tokens` draws, at `delta`, the bounds of the noise included;
    infinity where they take more than a thousandth of it.
    """
    event = text_event(choice, places, tokens, delta)
    return float(total([event], "replace-by-null").get_epsilon(delta))


def choice_of(parameters: Parameters, spread: float, noises: int = 1) -> Choice:
    """Return the draw of these parameters. InputError for those that two parties cannot run."""
    if parameters.adjacency != "replace-by-null" or parameters.centre:
        raise InputError("between two parties there is replace-by-null alone, and no centring")
    try:
        return Choice.of(parameters.batch, parameters.clip, parameters.temperature, spread, noises)
    except ValueError as exc:
        raise InputError(f"two parties cannot draw this: {exc}") from None


def for_budget(
    epsilon: float,
    delta: float,
    *,
    batch: int,
    temperature: float,
    max_new_tokens: int,
    top_k: int,
    places: int,
    noises: int = 1,
) -> Parameters:
    """Return parameters with the largest clip norm, or nearly, whose text spends `epsilon` at
    `delta` at most.
    """
    within = Parameters.for_budget(
        epsilon,
        (1 - _OF_DELTA) * delta,
        batch=batch,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
    )
    for shrunk in (1.0, 1 - 1e-6, 1 - 1e-4, 1 - 1e-2):
        clip = within.clip * shrunk
        parameters = Parameters(batch, clip, temperature, max_new_tokens, top_k)
        choice = choice_of(parameters, ANY_SPREAD, noises)
        if epsilon_of_text(choice, places, max_new_tokens, delta) <= epsilon:
            return parameters
    raise InputError(f"epsilon {epsilon:g} at delta {delta:g} cannot be had between two parties")
