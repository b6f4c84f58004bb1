"""InvisibleInk where both parties have the model, and sensitive references of their own.

At every token

  1. the provider announces the candidates and phi_pub of them, quantised: one vector, which the
     client compares with its own phi_pub, since two machines may differ in a last bit;
  2. each party computes phi_i of its own references in the clear, clips and sums, and adds noise
     of its own (`protocols.dp.choice.own_scores`);
  3. both sums go into a tournament, and the winner's place is opened to both.

Who learns what. Both learn the text and nothing else of each other's references: not how many of
them are null, nor their lengths. A reference is protected from the other party by its own party's
noise alone, which that party knows, at the scale of the exponential mechanism: rho is that of one
noise (`protocols.dp.noise`). Outsiders meet the sum of two. The price of noise that nobody has to
agree on is the token's distribution, which is flatter than softmax, about sqrt 2 times as hot;
noise that neither party knows would have softmax's own at the same rho, and take a secure draw of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Array

from protocols.dp.choice import UNIT, Choice, choose_of_both, own_scores
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import WireError
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Owner, public
from spu_llm.runtime.session import Session
from spu_llm.systems.dp_text.candidates import Candidates
from spu_llm.systems.dp_text.lanes import Lanes
from spu_llm.systems.dp_text.secure_records import SharedRequest

_SAME = 2.0**-6  # how far two machines' logits may be apart
_EMPTY = -1  # a place without a token


@dataclass
class OwnHalf:
    """A party's own: the model on the public prompt and on its private ones, which are those of one
    text, an empty list where a reference is null; noise: the draws of one token.
    """

    public: Lanes
    private: Lanes
    prompts: Sequence[Sequence[int]]
    noise: Callable[[], np.ndarray]
    _of_public: np.ndarray = field(init=False, repr=False)
    _of_private: np.ndarray = field(init=False, repr=False)

    def follow(self, request: SharedRequest, text: Sequence[int]) -> None:
        """Compute the logits after `text`, which grows by a token at a time."""
        if text:
            self._of_public = self.public.step(text[-1])[0]
            self._of_private = self.private.step(text[-1])
            return
        self._of_public = self.public.begin([request.query])[0]
        filler = [request.query[0]] * request.room
        self._of_private = self.private.begin([p or filler for p in self.prompts])

    def offer(self, request: SharedRequest, choice: Choice) -> np.ndarray:
        """Return the token at each place, phi_pub, and scores, both in units: int32 [3, places]."""
        candidates = Candidates.of(self._of_public, request, choice)
        tokens = np.full(request.places, _EMPTY)
        tokens[candidates.at] = candidates.tokens
        return np.stack([tokens, candidates.public, candidates.base]).astype(np.int32)

    def check(self, offered: np.ndarray, choice: Choice) -> None:
        """Raise WireError when these are not candidates of the model that is here."""
        tokens, units, base = offered
        at = tokens != _EMPTY
        own, vocab = self._of_public, len(self._of_public)
        fits = at.any() and np.all((tokens[at] >= 0) & (tokens[at] < vocab))
        if not fits or np.abs(units[at] * UNIT - own[tokens[at]]).max() > _SAME:
            raise WireError("the provider's candidates are not those of this party's model")
        wanted = np.full(len(base), -choice.behind)
        below = np.maximum(units[at].astype(np.int64) - units[at].max(), -choice.spread_units)
        wanted[at] = choice.references * below
        if np.any(base != wanted):
            raise WireError("the provider's scores do not follow from its public logits")

    def scores(self, offered: np.ndarray, choice: Choice) -> np.ndarray:
        """Return the sum of the clipped terms, with noise, int32 [places]."""
        tokens, units, _ = offered
        live = np.array([bool(p) for p in self.prompts])
        return own_scores(self._of_private[:, tokens], live, units, self.noise(), choice)


def _agree(offered: Array) -> Array:
    return reveal(offered, to=Owner.PUBLIC, label="candidates of the public model, their logits")


agree = SecureFunction(_agree, (Owner.PROVIDER,), "agree on candidates")


class SharedText:
    """Draws texts in a session, one after the other."""

    def __init__(self, session: Session, request: SharedRequest, choice: Choice) -> None:
        """Set up the draw of a session; choice: with two noises."""
        assert choice.noises == 2
        self._session, self._request, self.choice = session, request, choice

        def draw(client: Array, provider: Array, base: Array) -> Array:
            with jax.named_scope("verification"):
                place = choose_of_both(client, provider, base, choice)
                return reveal(place, to=Owner.PUBLIC, label="place of the token")

        owners = (Owner.CLIENT, Owner.PROVIDER, Owner.PUBLIC)
        self.draw = SecureFunction(draw, owners, "draw of both")

    def prepare(self) -> None:
        """Compile everything and agree with the peer on every program, before the first secret."""
        own = jax.ShapeDtypeStruct((self._request.places,), np.int32)
        self._session.prepare(agree, jax.ShapeDtypeStruct((3, *own.shape), np.int32))
        self._session.prepare(self.draw, own, own, own)

    def text(
        self,
        client: OwnHalf | None,
        provider: OwnHalf | None,
        ends: Callable[[int], bool],
        on_token: Callable[[int], None] = lambda token: None,
    ) -> list[int]:
        """Draw one text and return its tokens, with the one that ends it if it was drawn; each
        party has its own half. `ends`: which tokens do, as both know.
        """
        tokens = list[int]()
        while True:
            with self._session.meter.in_phase("draw"):
                tokens.append(self.draw_token(client, provider, tokens))
            on_token(tokens[-1])
            if ends(tokens[-1]) or len(tokens) == self._request.max_new_tokens:
                return tokens

    def draw_token(
        self, client: OwnHalf | None, provider: OwnHalf | None, text: Sequence[int]
    ) -> int:
        """Draw the token after `text`; both learn it."""
        session, request, choice = self._session, self._request, self.choice
        halves = ((CLIENT, client), (PROVIDER, provider))
        for rank, half in halves:
            session.local(rank, OwnHalf.follow, half, request, text)
        # 1.
        shape = 3, request.places
        offered = session.private(
            PROVIDER, OwnHalf.offer, shape, np.int32, provider, request, choice
        )
        table = session.get(session.call(agree, offered))
        assert table is not None
        session.local(CLIENT, OwnHalf.check, client, table, choice)
        # 2.
        own: list[Any] = [
            session.private(rank, OwnHalf.scores, shape[1:], np.int32, half, table, choice)
            for rank, half in halves
        ]
        # 3.
        args = *own, public(table[2])
        session.preprocess(self.draw, *args)
        place = session.get(session.call(self.draw, *args))
        assert place is not None
        at = int(place)
        token = int(table[0][at]) if 0 <= at < request.places else _EMPTY
        if token == _EMPTY:
            raise WireError(f"place {at} won, at which no candidate stands")
        return token


def declare(session: Session, request: SharedRequest) -> None:
    """Declare to the ledger what follows from the shape of the protocol."""
    for learner in (CLIENT, PROVIDER):
        say = session.ledger.declare
        say(learner, "the model, the query, and every parameter of the draw")
        say(
            learner,
            f"{request.texts} texts of {request.batch} references each, nulls among them, "
            f"{request.of_provider} of them the provider's",
        )
        say(learner, f"length that references are filled or cut to: {request.room} tokens a prompt")
        say(learner, "when each text ends")
