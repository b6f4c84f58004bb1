"""One verification between two parties, and the integer model that it must follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from scipy.stats import chi2

from protocols.verification import post, race, token
from protocols.verification.distribution import Sampling
from protocols.verification.marked import Marked
from protocols.verification.sampling import Widths
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.channel import Channel
from spu_llm.core.ledger import Ledger, Opening
from spu_llm.core.values import CLIENT, PROVIDER, Owner, Private, Public, Value
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import private_tree
from spu_llm.runtime.simulation import Simulation

UNIT = 2.0**-18


@dataclass(frozen=True)
class Step:
    """Weights (integers) [d + 1, vocab], the drafts with their distributions in multiples of 2^-16,
    and the joint random integers that verification uses.
    """

    weights: np.ndarray
    drafts: np.ndarray  # [d]
    q: np.ndarray  # [d, vocab]
    r: np.ndarray  # [d]
    u: np.ndarray  # [2]


def random_step(
    rng: np.random.Generator, drafts: int, vocab: int, *, certain: bool = False
) -> Step:
    """Peaked rows of at most one, distributions near to them, drafts from these; those of drafts
    that are `certain` are of one token each.
    """
    logits = rng.normal(0, 2, (drafts + 1, vocab))
    weights = np.rint(np.exp(logits - logits.max(-1, keepdims=True)) / UNIT).astype(np.int64)
    near = logits[:drafts] + rng.normal(0, rng.choice([0.0, 0.5, 2.0]), (drafts, vocab))
    q = (
        np.stack([integers_of(np.exp(row - row.max())) for row in near])
        if drafts
        else (np.zeros((0, vocab), np.int64))
    )
    chosen = np.array([rng.choice(vocab, p=row / row.sum()) for row in q], np.int64)
    if certain:
        q = (np.arange(vocab) == chosen[:, None]).astype(np.int64) << Widths.draft
    words = rng.integers(0, 2**31, drafts + 2)
    return Step(weights, chosen, q, words[:drafts], words[drafts:])


def integers_of(p: np.ndarray, bits: int = Widths.draft) -> np.ndarray:
    """Integers that sum to 2^bits, near p (not the product's own rounding)."""
    counts = np.floor(p / p.sum() * 2**bits).astype(np.int64)
    counts[np.argmax(counts)] += 2**bits - counts.sum()
    return counts


def model(step: Step, widths: Widths) -> tuple[int, int]:
    """Return (k, token) of `token` by Python's integers; -1 is the rejected draft."""
    vocab = step.weights.shape[1]
    k = 0
    while k < len(step.drafts):
        d, z = int(step.drafts[k]), int(step.weights[k].sum())
        r = int(step.r[k]) % 2**widths.accept
        if (2 * r + 1) * int(step.q[k, d]) * z >= int(step.weights[k, d]) << widths.scale:
            break
        k += 1
    w = [int(x) for x in step.weights[k]]
    if k < len(step.drafts):
        z = sum(w)
        w = [max(0, (x << widths.draft) - int(y) * z) for x, y in zip(w, step.q[k], strict=True)]
    excess = widths.draft if len(step.drafts) else 0
    if k == len(step.drafts) > 0:
        w = [x << widths.draft for x in w]
    assert widths.shift(excess) == 0, "rounding is random; take a smaller vocabulary"
    size = int(np.ceil(np.sqrt(vocab)))
    blocks = [sum(w[i : i + size]) for i in range(0, vocab, size)]
    u = [int(x) % 2**widths.draw for x in step.u]
    block = place(blocks, u[0], widths.draw)
    if block == len(blocks):
        return k, -1
    return k, block * size + place(w[block * size : (block + 1) * size], u[1], widths.draw)


def place(weights: Sequence[int], u: int, draw: int) -> int:
    """Return the first place whose prefix sum exceeds u / 2^draw of the total."""
    total, prefix = sum(weights), 0
    for i, w in enumerate(weights):
        prefix += w
        if u * total < prefix << draw:
            return i
    return len(weights)


@dataclass(frozen=True)
class Seen:
    """What a run gave to one party: the outcome, the accepted count, openings, and every opened
    value that this party got to know, by label.
    """

    outcome: Any
    accepted: Any  # int, or [lane]; None where it is not known
    openings: list[Opening]
    opened: list[tuple[str, list[Any]]]


class Recording(Ledger):
    """A ledger that keeps what this party reads."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[str, list[Any]]] = []

    def open(
        self, channel: Channel, rank: int, value: Value, to: Owner, label: str
    ) -> Public | Private:
        actual = super().open(channel, rank, value, to, label)
        if actual.value is not None:
            self.values.append((label, actual.value.reshape(-1).tolist()))
        return actual


def shared(name: str, of: tuple[int, ...]) -> Any:
    """Return `verify` of a variant on rows [d + 1, vocab] or [lane, d + 1, vocab] that both parties
    hold half of.
    """
    verifying = {
        "token": lambda w, of_client, of_provider: token.verify(w, of_client, of_provider),
        "hidden": lambda w, of_client, of_provider: token.verify(
            w, of_client, of_provider, hide_progress=True
        ),
        "post": lambda w, of_client, of_provider: post.verify(w, of_client, Sampling()),
        "naive": lambda w, of_client, of_provider: post.verify(
            w, of_client, Sampling(), naive=True
        ),
        "top-k": lambda w, of_client, of_provider: post.verify(w, of_client, Sampling(1.0, 3)),
        "top-k all": lambda w, of_client, of_provider: post.verify(
            w, of_client, Sampling(1.0, 10**9)
        ),
        "both": lambda w, of_client, of_provider: post.verify(w, of_client, Sampling(1.0, 4, 0.8)),
        "top-p": lambda w, of_client, of_provider: post.verify(w, of_client, Sampling(1.0, 0, 0.8)),
        "race": lambda w, of_client, of_provider: race.verify(w, of_client.drafts, 27),
        "race hidden": lambda w, of_client, of_provider: race.verify(
            w, of_client.drafts, 27, hide_progress=True
        ),
        "marked": Marked(Sampling()).verify,
        "marked hidden": Marked(Sampling(), True).verify,
    }[name]
    verify = verifying if len(of) == 3 else of_one_lane(verifying)
    C, P = Owner.CLIENT, Owner.PROVIDER  # noqa: N806
    return SecureFunction(
        lambda a, b, of_client, of_provider: verify(a + b, of_client, of_provider),
        (C, P, C, P),
        f"{name} {of}",
    )


def of_one_lane(verify: Any) -> Any:
    """Return `verify` without the lanes' axis."""

    def of_lane(*inputs: Any) -> Any:
        actual = verify(*jax.tree.map(lambda x: x[None], inputs))
        return jax.tree.map(lambda x: x[0], actual)

    return of_lane


_FUNCTIONS: dict[tuple[str, tuple[int, ...]], Any] = {}


def two_parties(
    simulation: Simulation, name: str, rows: np.ndarray, of_client: Any, of_provider: Any
) -> list[Seen]:
    """Return both parties' view of one verification of float rows [d + 1, vocab], or of several
    side by side, lane first.
    """
    key = name, rows.shape
    function = _FUNCTIONS.setdefault(key, shared(*key))
    half = np.round(np.random.default_rng(0).normal(0, 3, rows.shape) / UNIT) * UNIT

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    def program(session: PartySession) -> Seen:
        session.ledger = session.party.ledger = recording = Recording()
        halves = [
            session.private(CLIENT, lambda: half.astype(np.float32), rows.shape, np.float32),
            session.private(
                PROVIDER, lambda: (rows - half).astype(np.float32), rows.shape, np.float32
            ),
        ]
        inputs = (
            private_tree(session, CLIENT, lambda: of_client, shapes(of_client)),
            private_tree(session, PROVIDER, lambda: of_provider, shapes(of_provider)),
        )
        outcome, accepted = session.call(function, *halves, *inputs)
        count = session.get(accepted)
        return Seen(
            jax.tree.map(session.get, outcome),
            count if count is None or count.ndim else int(count),
            recording.openings,
            recording.values,
        )

    return simulation.run(program)


def follows(k: int, drafts: int) -> list[bool]:
    """Return the bits that may be opened of where drafts stop."""
    return [i >= k for i in range(drafts)]


def token_inputs(step: Step, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return both parties' inputs to `token.verify`: their randomness has the step's as its xor."""
    count, vocab = step.q.shape
    both = []
    of_provider = rng.integers(0, 2**31, count + 2).astype(np.int32)
    of_client = (np.concatenate([step.r, step.u]) ^ of_provider).astype(np.int32)
    for words in (of_client, of_provider):
        both.append(token.Randomness(words[:count], words[count:]))
    q = np.concatenate([step.q, np.zeros((1, vocab), np.int64)]).astype(np.int32)
    return token.ClientInput(step.drafts.astype(np.int32), q, both[0]), both[1]


def chi_square_p(counts: np.ndarray, p: np.ndarray) -> float:
    """Return p-value of counts against a distribution."""
    wanted = counts.sum() * p
    return float(chi2.sf(((counts - wanted) ** 2 / wanted).sum(), p.size - 1))
