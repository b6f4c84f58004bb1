"""Verification of drafted tokens: one interface, five variants, and who learns what.

A step: the client drafts in the clear (`propose`), both parties run one secure forward over the
last token and the drafts, `verify` decides on its logits which drafts stay, and the client writes
them and one more token down (`resolve`). Whatever the variant, the text has the private model's
distribution; the variants differ in what the parties see on the way:

| variant | client learns | provider learns |
|---|---|---|
| `naive`, `post` | tokens, all rejection bits (top-k, top-p: and as many more), one row of the \
distribution a step | draft length, steps, accepted count per step |
| `token` (default), `race`, `marked` | the emitted tokens | draft length, steps, length limits |
| `token`, `race`, `marked` with progress shown | the emitted tokens | and accepted count per step |
| with m candidates (progress hidden) | the emitted tokens of all candidates | and m |

In `marked` the provider knows the noise, so that steps and accepted counts test a prompt that it
guesses (`protocols.verification.marked`).

The emitted tokens are those of whole steps: where the text ends inside one, the client has seen up
to d tokens more. With m candidates they are those of all m continuations that a step verifies side
by side, of which one goes on: m times the model's samples; the provider learns m, too. They are a
function of what the client brings, and it may bring what it likes:
drafts and their distributions q everywhere, thresholds r in `naive` and `post`, the noise in
`race`; in `marked` drafts alone. In `token` a client that claims false distributions learns more
from a token than an honest one (a claim that leaves room for one token alone asks whether p exceeds
it; a claim of next to nothing forces a draft through). Joint randomness takes r from its hands, not
q: no variant is more than semi-honest.

A party that deviates reaches more:

| who, how | with progress shown | with progress hidden |
|---|---|---|
| provider adds constants to its share inside `select`, or serves weights made for it | the \
opened stop answers a question of its choice about the drafts or the prompt at every step: a draft \
among 64 candidates in 6 steps | nothing at a step; when the text ends, after how many steps, and \
whether the client gives up for an activation out of range may still depend on what it asked |
| provider brings noise of its choice in `marked` | the same: a large number makes a token of its \
choice win | the same; and the text is the provider's |
| client adds constants to its shares | logits and acceptance biased at will, and tokens that \
answer questions about single weights: layers can be extracted, as MUSE does (Lehmkuhl et al., \
USENIX Security 2021) | the same |

Where the logits are the client's (a split model's, `spu_llm.systems.split.secure`) nothing runs on
shares, and the rule alone is left: `protocols.verification.plain`.

"The private model's distribution" is meant up to rounding; the tests bound it. A draft is accepted
with min(1, p / q) rounded to a multiple of 2^-accept (`protocols.verification.sampling.Widths`: 14
bits for 4,096 tokens, 11 for 50,257), the token drawn by fractions of 20 bits; where these do not
fit beside a wide row, its low bits are rounded by a coin. The logits themselves come of a forward
with weights of 18 fraction bits, pieces for its nonlinear functions, and a coin at every
truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from protocols.verification.distribution import Sampling, Streams
from protocols.verification.marked import Marked
from protocols.verification.post import Post
from protocols.verification.race import Race
from protocols.verification.token import Token
from spu_llm.core.errors import InputError
from spu_llm.core.op import Functionality
from spu_llm.core.prg import Prg

VARIANTS = ("token", "post", "naive", "race", "marked")
HIDING = ("token", "race", "marked")  # those that can hide progress from the provider
BRANCHING = ("token", "race")  # those whose steps may have several candidates

_STEPS = "draft length, number of steps"
_PUBLISHED = Functionality(
    client="emitted tokens, all rejection bits (with top-k or top-p as many more) under thresholds "
    "of its own choice, one whole row of the distribution per step",
    provider=f"{_STEPS}, accepted count per step",
)
FUNCTIONALITIES = {  # with progress shown
    "naive": _PUBLISHED,
    "post": _PUBLISHED,
    "token": Functionality(
        client="emitted tokens of whole steps, for drafts and distributions that it brings",
        provider=f"{_STEPS}, accepted count per step",
    ),
    "race": Functionality(
        client="emitted tokens of whole steps, under noise of its own choice",
        provider=f"{_STEPS}, accepted count per step",
    ),
    "marked": Functionality(
        client="emitted tokens of whole steps, under noise of the provider's",
        provider=f"{_STEPS}, accepted count per step",
    ),
}


class Rule(Protocol):
    """The client's plaintext half of a variant, for one way of sampling."""

    @property
    def sampling(self) -> Sampling:
        """Return how tokens are drawn."""

    def propose(
        self, logits: np.ndarray, position: int, streams: Streams
    ) -> tuple[int, np.ndarray]:
        """Return a draft for `position` of the text from the public model's logits [vocab], and the
        distribution float64 [vocab] that it was drawn from.
        """

    def client_input(
        self, drafts: Sequence[int], q: np.ndarray, position: int, streams: Streams
    ) -> Any:
        """Return the client's input to the secure half: its drafts with their distributions q
        [d, vocab]; `position` is the first draft's.
        """

    def resolve(
        self, outcome: Any, drafts: Sequence[int], q: np.ndarray, uniform: Callable[[], float]
    ) -> tuple[int, int]:
        """Return the number of accepted drafts, and the token after them."""


class Verifier(Rule, Protocol):
    """One variant for one way of sampling; both parties hold equal ones.

    Shapes: d drafts, logits [lane, d + 1, vocab] already divided by the temperature; row i belongs
    to the position after draft i - 1. `d` may be 0: then one token is drawn. Inputs and outcomes
    are described of one lane; `verify` takes and gives them for all lanes, lane first, at the
    messages of one.
    """

    @property
    def name(self) -> str:
        """Return the variant's name, as `--verify` calls it."""

    @property
    def hide_progress(self) -> bool:
        """Return whether the provider does not learn how many drafts stay."""

    def client_shapes(self, drafts: int, vocab: int) -> Any:
        """Return the shapes and types of the client's input to `verify`."""

    def provider_shapes(self, drafts: int, vocab: int) -> Any:
        """Return the shapes and types of the provider's input to `verify`: its part of the joint
        randomness, noise, or None.
        """

    def provider_input(self, drafts: int, vocab: int, stream: Prg) -> Any:
        """Make the provider's input to `verify`."""

    def verify(self, logits: Array, client: Any, provider: Any) -> tuple[Any, Array]:
        """Run the secure half: return an outcome for the client alone and the numbers of accepted
        drafts [lane], which are the client's or public.
        """


def side_by_side(lanes: Sequence[Any]) -> Any:
    """Stack trees of arrays, one for each lane, into one tree of arrays, lane first."""
    return jax.tree.map(lambda *of_lanes: np.stack(of_lanes), *lanes)


def lanes_of(tree: Any) -> list[Any]:
    """Split a tree of arrays, lane first, into one tree for each lane."""
    leaves, shape = jax.tree.flatten(tree)
    return [jax.tree.unflatten(shape, of_lane) for of_lane in zip(*leaves, strict=True)]


def functionality(
    variant: str, *, hide_progress: bool = False, candidates: int = 1
) -> Functionality:
    """Return what a variant gives to whom. `candidates`: continuations that a step verifies side by
    side, with progress hidden.
    """
    declared = FUNCTIONALITIES[variant]
    if not hide_progress:
        return declared
    if candidates == 1:
        return Functionality(client=declared.client, provider=f"{_STEPS}, length limits")
    return Functionality(
        client=f"of each of {candidates} candidates a step: {declared.client}",
        provider=f"{_STEPS}, number of candidates, length limits",
    )


def verifier(variant: str, sampling: Sampling, *, hide_progress: bool = False) -> Verifier:
    """Return the variant of that name; raise InputError for what it does not offer."""
    check(variant, sampling)
    if hide_progress and variant not in HIDING:
        raise InputError(f"--verify {variant} shows progress to the provider; use --verify token")
    if sampling.greedy or variant == "race":
        return Race(sampling, not sampling.greedy, hide_progress)
    if variant == "marked":
        return Marked(sampling, hide_progress)
    if variant == "token":
        return Token(sampling, hide_progress)
    return Post(sampling, naive=variant == "naive")


def check(variant: str, sampling: Sampling) -> None:
    """Raise InputError when the variant cannot sample this way."""
    if variant not in VARIANTS:
        raise InputError(f"unknown --verify {variant!r}; choose from {', '.join(VARIANTS)}")
    if sampling.greedy and variant != "token":
        raise InputError(
            f"--verify {variant} has no greedy decoding; use --verify token or a --temperature"
        )
    if sampling.greedy and sampling.truncated:
        raise InputError("--top-k and --top-p have no use at --temperature 0; leave them out")
    if sampling.truncated and variant != "post":
        raise InputError(
            f"--verify {variant} has no --top-k and --top-p: cutting a row that nobody sees needs "
            "a sort on shares; use --verify post, which shows one row a step to the client"
        )
