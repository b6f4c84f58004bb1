"""InvisibleInk without a trusted curator: the client's references, the provider's model.

A text is algorithm 1 of InvisibleInk. At every token

  1. the B private prompts go through one secure forward as its lanes; their last rows stay shares;
  2. the provider alone computes phi_pub, of public text with its own model, in the clear, and the
     candidates V_k+; it puts them into a random order, filled up to a fixed number of places;
  3. phi_i of the candidates are shares: rows times the head's columns, which only the provider has;
  4. the client draws noise; of clip, sum, noise and tournament (`protocols.dp.choice.choose`) only
     the winner's place is opened, to the provider, who knows which token it stands for;
  5. the token is public. It is what differential privacy lets out.

phi_pub. It is one vector of the provider's, quantised once, which enters both differences and
scores: there is no second copy that could differ in a bit. Were the candidates public instead, step
3 would need no products, and the client would see the model's k likeliest tokens at each position
of the text; so it sees none of them but the one drawn, and not even their number.

Who learns what. Both learn the text, when it ends, and the public request. The provider learns
nothing else: all private prompts are as long as each other, the bit that a reference is null is the
client's secret, and no bit is opened that says whether activations left their ranges, since it
would depend on the references (clipping holds for every word). The client learns nothing else of
the model, whose tokens follow from prompts and noise of its own choice. Of references, the provider
and whoever reads the text learn draws that are differentially private (`secure_budget`), against
semi-honest parties with bounded computing. One that deviates is not covered: a provider may add to
its shares, or give a phi_pub out of range, and the client may skip clipping or noise, though the
references are its own.

The sharing noise of a forward moves phi_i, as any rounding would, before the differences are
clipped. What one reference adds stays within C, and null adds 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from models.family import ModelConfig, Outside
from protocols.arithmetic.cached import times_rows
from protocols.arithmetic.known_rows import known_rows
from protocols.dp.choice import Choice, choose
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import WireError
from spu_llm.core.prg import Prg
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.runtime.session import Session, private_tree
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs
from spu_llm.systems.decoding.judges import RowsJudge
from spu_llm.systems.decoding.session_shape import SessionShape
from spu_llm.systems.dp_text.candidates import Candidates
from spu_llm.systems.dp_text.lanes import Lanes
from spu_llm.systems.dp_text.secure_records import TextRequest

_NOTHING = JudgeInputs(None, None)


@dataclass(frozen=True)
class KeepRows(RowsJudge):
    """Keeps the rows before the head, [lane, n, width], as shares. Nothing at all is opened, not
    even whether activations left their ranges: what takes the rows must hold for every word of the
    ring (`protocols.dp.clip`).
    """

    hide_progress: bool = False
    name: str = "rows"

    def take(self, rows: Array, outside: Outside) -> tuple[Array, None]:
        return rows, None


@dataclass
class ClientHalf:
    """prompts: of one text, token ids [B][room], an empty list where a reference is null. noise:
    the draws of one token.
    """

    prompts: Sequence[Sequence[int]]
    noise: Callable[[], np.ndarray]
    filler: int = 0

    def draw_noise(self) -> np.ndarray:
        return self.noise()

    def rows(self, room: int) -> np.ndarray:
        """Return prompts int32 [B, room]; what is in a null reference's lane is never looked at."""
        return np.array([p or [self.filler] * room for p in self.prompts], np.int32)

    def live(self) -> np.ndarray:
        return np.array([bool(p) for p in self.prompts])


@dataclass
class ProviderHalf:
    """public: the model on the public prompt. weights: folded. order: the stream of the candidates'
    orders.
    """

    public: Lanes
    weights: Any
    order: Prg
    offered: Candidates | None = None

    def offer(self, request: TextRequest, choice: Choice, text: Sequence[int]) -> tuple[Any, ...]:
        """Return what `TextFunctions.draw` takes from the provider after `text`, which grows by a
        token at a time: the candidates' columns and biases of the head, phi_pub in units, and base.
        """
        logits = self.public.step(text[-1]) if text else self.public.begin([request.query])
        self.offered = candidates = Candidates.of(logits[0], request, choice, self.order)
        head = self.weights["head"]
        columns = np.zeros((request.places, np.shape(head["weight"])[0]), np.float32)
        columns[candidates.at] = np.asarray(head["weight"]).T[candidates.tokens]
        bias = np.zeros(request.places, np.float32)
        if "bias" in head:
            bias[candidates.at] = np.asarray(head["bias"])[candidates.tokens]
        return columns, bias, candidates.public, candidates.base

    def token(self, place: np.ndarray | None) -> np.ndarray:
        """Return the token at `place`, an int32 scalar. WireError for a place without a token."""
        assert self.offered is not None and place is not None
        return np.array(self.offered.token(int(place)), np.int32)


class TextFunctions:
    """The secure functions of a text, beside the decoder's."""

    def __init__(self, config: ModelConfig, request: TextRequest, choice: Choice) -> None:
        places, width, shape = request.places, config.width, jax.ShapeDtypeStruct

        def draw(
            rows: Array,
            live: Array,
            noise: Array,
            columns: Array,
            bias: Array,
            public: Array,
            base: Array,
        ) -> Array:
            with jax.named_scope("head"):
                lanes = len(live)
                product = times_rows(
                    rows.reshape(1, lanes, width), known_rows(columns[None]), tile=lanes
                )
                private = product[0] + bias
            with jax.named_scope("verification"):
                place = choose(private, live, public, base, noise, choice)
                return reveal(
                    place, to=Owner.PROVIDER, label="place of the token among its candidates"
                )

        def announce(token: Array) -> Array:
            return reveal(token, to=Owner.PUBLIC, label="token")

        C, P, J = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT  # noqa: N806
        self.draw = SecureFunction(draw, (J, C, C, P, P, P, P), "draw")
        self.announce = SecureFunction(announce, (P,), "announce token")
        # What the parties put in.
        self.live, self.noise = shape((request.batch,), np.bool_), shape((places,), np.int32)
        self.of_provider = (
            shape((places, width), np.float32),
            shape((places,), np.float32),
            shape((places,), np.int32),
            shape((places,), np.int32),
        )
        self.rows = shape((request.batch, 1, width), np.float32)


class SecretText:
    """Draws texts in a session, one after the other; compiles once."""

    def __init__(
        self, session: Session, config: ModelConfig, request: TextRequest, weights: Any
    ) -> None:
        """Set up the functions of a text; weights: the provider's, as values of the session."""
        self._session, self._request, self._weights = session, request, weights
        self.choice = request.choice(config)
        self._functions = TextFunctions(config, request, self.choice)
        rows = request.room + request.max_new_tokens
        self._layout = SessionShape(config, (request.room,) * request.batch, (rows,), rows)
        self._vocab = config.vocab_size

    def prepare(self) -> None:
        """Compile everything and agree with the peer on every program, before the first secret."""
        f, session = self._functions, self._session
        self.decoder().prepare([1])
        session.prepare(f.draw, f.rows, f.live, f.noise, *f.of_provider)
        session.prepare(f.announce, jax.ShapeDtypeStruct((), np.int32))

    def text(
        self,
        client: ClientHalf | None,
        provider: ProviderHalf | None,
        ends: Callable[[int], bool],
        on_token: Callable[[int], None] = lambda token: None,
    ) -> list[int]:
        """Draw one text and return its tokens, with the one that ends it if it was drawn; each
        party has its own half. `ends`: which tokens do, as both know.
        """
        session, request = self._session, self._request
        decoder, tokens = self.decoder(), list[int]()
        with session.meter.in_phase("prefill"):
            rows, live = self.begin(decoder, client)
        stays = np.ones((request.batch, 1), bool)
        while True:
            with session.meter.in_phase("draw"):
                token = self.draw(client, provider, rows, live, tokens)
            tokens.append(token)
            on_token(token)
            if ends(token) or len(tokens) == request.max_new_tokens:
                return tokens
            # The token is public; the decoder takes tokens of the client's.
            again = session.private(CLIENT, np.full, stays.shape, np.int32, stays.shape, token)
            with session.meter.in_phase("decode"):
                rows = decoder.step(again, _NOTHING, stays).outcome

    def begin(self, decoder: Decoder, client: ClientHalf | None) -> tuple[Any, Any]:
        """Run the prefill: returns shared rows [B, 1, width] after the prompts, and which are of
        references: the client's.
        """
        session, request = self._session, self._request
        shape, live = (request.batch, request.room), self._functions.live.shape
        prompts = session.private(CLIENT, ClientHalf.rows, shape, np.int32, client, request.room)
        rows = decoder.prefill(prompts, _NOTHING).outcome
        return rows, session.private(CLIENT, ClientHalf.live, live, np.bool_, client)

    def draw(
        self,
        client: ClientHalf | None,
        provider: ProviderHalf | None,
        rows: Any,
        live: Any,
        tokens: Sequence[int],
    ) -> int:
        """Draw the token after `tokens`, from shared rows that follow them; both learn it."""
        session, request, f = self._session, self._request, self._functions
        offered = private_tree(
            session,
            PROVIDER,
            ProviderHalf.offer,
            f.of_provider,
            provider,
            request,
            self.choice,
            tokens,
        )
        noise = session.private(CLIENT, ClientHalf.draw_noise, f.noise.shape, np.int32, client)
        args = rows, live, noise, *offered
        session.preprocess(f.draw, *args)
        place = session.get(session.call(f.draw, *args))
        token = session.private(PROVIDER, ProviderHalf.token, (), np.int32, provider, place)
        heard = session.get(session.call(f.announce, token))
        assert heard is not None
        if not 0 <= int(heard) < self._vocab:
            raise WireError(f"the provider announces {int(heard)}, which is no token")
        return int(heard)

    def decoder(self) -> Decoder:
        """Make the decoder of one text."""
        return Decoder(self._session, self._layout, KeepRows(), self._weights)


def declare(session: Session, request: TextRequest) -> None:
    """Declare to the ledger what follows from the shape of the protocol."""
    for learner in (CLIENT, PROVIDER):
        session.ledger.declare(learner, "model shape, vocabulary and context length")
        session.ledger.declare(learner, "when each text ends")
    say = session.ledger.declare
    say(PROVIDER, f"the query, {len(request.query)} tokens, and every parameter of the draw")
    say(PROVIDER, f"{request.texts} texts of {request.batch} references each, nulls among them")
    say(PROVIDER, f"length that references are filled or cut to: {request.room} tokens a prompt")
    say(CLIENT, "ranges of the model's activations, by powers of two")
    say(CLIENT, f"of the candidates only that there are {request.places} at most")
    say(PROVIDER, "whether the client had the weights' hint already")
