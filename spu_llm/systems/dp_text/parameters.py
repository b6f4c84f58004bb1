"""The public parameters of a generator, and what they spend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dp_accounting import dp_event

from spu_llm.core.errors import InputError
from spu_llm.systems.dp_text.accounting import (
    ADD_OR_REMOVE,
    ADJACENCIES,
    REACH,
    BoundedRangeDpEvent,
    epsilon_of,
    rho_for,
)
from spu_llm.systems.dp_text.mechanism import LARGEST, LEAST_TEMPERATURE, ROUNDING

MAX_BATCH, MAX_TOKENS, MAX_TEMPERATURE = 4096, 100_000, 100.0
MAX_EPSILON, MAX_DELTA = 1000.0, 0.01


@dataclass(frozen=True)
class Parameters:
    """batch: B references to a text, nulls counted (add-or-remove: B is what the sum of terms is
    divided by, however many there are); clip: C; temperature: tau; top_k: k, None for
    the full vocabulary; max_new_tokens: T, all of which are charged whatever the text's length;
    centre: take each reference's median difference out before clipping.

    All of it is public and chosen without looking at the references. InputError for nonsense.
    """

    batch: int
    clip: float
    temperature: float
    max_new_tokens: int
    top_k: int | None = None
    adjacency: str = "replace-by-null"
    centre: bool = False

    def __post_init__(self) -> None:
        if self.adjacency not in ADJACENCIES:
            raise InputError(
                f"the adjacency must be one of {', '.join(ADJACENCIES)}, found {self.adjacency!r}; "
                "others are not accounted for"
            )
        _check_size("the batch", self.batch, MAX_BATCH)
        _check_size("the number of new tokens", self.max_new_tokens, MAX_TOKENS)
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top-k must be 1 or more, found {self.top_k}")
        _check_temperature(self.temperature)
        if not 0 <= self.clip <= LARGEST:
            raise InputError(f"the clip norm must be 0 to {LARGEST:g}, found {self.clip:g}")

    @staticmethod
    def for_budget(
        epsilon: float,
        delta: float,
        *,
        batch: int,
        temperature: float,
        max_new_tokens: int,
        top_k: int | None = None,
        adjacency: str = "replace-by-null",
        centre: bool = False,
    ) -> Parameters:
        """Return parameters with the largest clip norm that (epsilon, delta) allows: C = B tau
        sqrt(2 rho / T), where rho inverts the tight conversion. (Section 5.4 prints C = B tau /
        sqrt(2 rho / T), a slip that its theorem 2 contradicts.)
        """
        check_budget(epsilon, delta)
        # Everything else is checked before anything is computed with it.
        Parameters(batch, 0.0, temperature, max_new_tokens, top_k, adjacency, centre)
        rho = rho_for(epsilon, delta)
        reach = REACH[adjacency]
        clip = batch * temperature * (math.sqrt(8 * rho / max_new_tokens) - ROUNDING) / (2 * reach)
        if clip <= 0:
            raise InputError(f"epsilon {epsilon:g} is too little for {max_new_tokens} tokens")
        parameters = Parameters(
            batch, min(clip, LARGEST), temperature, max_new_tokens, top_k, adjacency, centre
        )
        while parameters.epsilon(delta) > epsilon:  # by a last bit
            parameters = Parameters(
                batch,
                parameters.clip * (1 - 2.0**-50),
                temperature,
                max_new_tokens,
                top_k,
                adjacency,
                centre,
            )
        return parameters

    @property
    def any_number(self) -> bool:
        """Tell whether a text may have more or fewer than B references, B a public constant that
        their sum is divided by.
        """
        return self.adjacency == ADD_OR_REMOVE

    @property
    def sensitivity(self) -> float:
        """Return the most that one reference changes a coordinate of phibar by."""
        return REACH[self.adjacency] * self.clip / self.batch

    @property
    def token_event(self) -> BoundedRangeDpEvent:
        """Return what one token spends: range 2 Delta / tau, and what rounding adds."""
        return BoundedRangeDpEvent(2 * self.sensitivity / self.temperature + ROUNDING)

    @property
    def text_event(self) -> dp_event.DpEvent:
        """Return what a text spends at full length: what each batch of references is charged."""
        return dp_event.SelfComposedDpEvent(self.token_event, self.max_new_tokens)

    @property
    def rho_token(self) -> float:
        return self.token_event.rho

    @property
    def rho(self) -> float:
        """Return rho of a text: T C^2 / (2 B^2 tau^2) for replace-by-null (theorem 2) and
        add-or-remove, 4 times that for the other adjacencies.
        """
        return self.max_new_tokens * self.rho_token

    def epsilon(self, delta: float) -> float:
        """Return the tight epsilon of a text at `delta`."""
        return epsilon_of(self.rho, delta)


def check_budget(epsilon: float, delta: float) -> None:
    """Raise InputError unless epsilon and delta bound anything."""
    if not 0 < epsilon <= MAX_EPSILON:
        raise InputError(f"epsilon must be above 0 and at most {MAX_EPSILON:g}, found {epsilon:g}")
    if not 0 < delta <= MAX_DELTA:
        raise InputError(f"delta must be above 0 and at most {MAX_DELTA:g}, found {delta:g}")


def _check_temperature(temperature: float) -> None:
    if not LEAST_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise InputError(
            f"the temperature must be {LEAST_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, found "
            f"{temperature:g}"
        )


def _check_size(name: str, size: Any, most: int) -> None:
    if not 1 <= size <= most:
        raise InputError(f"{name} must be 1 to {most}, found {size}")
