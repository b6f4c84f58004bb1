"""Does a party hide every bit that it sends under a fresh bit of its own? Exactly, by replay.

The party's half of an op is run again with one bit of its fresh randomness flipped at a time, and
with all that the peer has as it was: messages, the common stream, the peer's masks and its shares
of prepared results (so that this party's shares follow from the masks). The changes of what is
sent, as vectors over F_2, must span all bits of the messages. Where messages are something minus,
or xor, a fresh mask, the map from masks to messages is then one to one: to the peer they are
uniform, whatever this party holds. Words from any other stream, one mask for two words, or the
masks of an earlier round span too little, however small the part of a message that they leave open;
no sample is taken, so that nothing is left to chance.

What this does not show: the span is that at one choice of shares and randomness, drawn anew at
every run of the test; and it counts a pad that a hash makes of a fresh key as fresh.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spu_llm.core.correlation import Correlation, Correlations, others_results
from spu_llm.core.integers import Factor
from spu_llm.core.op import ProtocolOp
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import Arith, Bool, Value
from spu_llm.testing.run import FRAC_BITS, Case, Taken, common_stream, run_op

_PADDING_RUNS = 24


class _Tape:
    """A channel to nobody: gives what came in once, keeps what is sent."""

    def __init__(self, incoming: Sequence[bytes]) -> None:
        self._incoming = iter(incoming)
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def recv(self) -> bytes:
        return next(self._incoming)


class _Again(Prg):
    """A stream that gives words once drawn, again."""

    def __init__(self, words: Sequence[np.ndarray]) -> None:
        self._words = iter(words)

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        return next(self._words).reshape(shape)

    def child(self, label: str) -> Prg:
        return Prg.from_seed(0, label)


@dataclass
class _Draw:
    """Units once drawn: this party's words and the peer's."""

    correlation: Correlation
    own: list[np.ndarray]  # masks
    results: list[np.ndarray]
    peer: Correlations
    fixed: Factor | None

    def settle(self) -> None:
        """Compute this party's results from the masks and the peer's results."""
        masks = self.own, self.peer.masks
        self.results = others_results(self.correlation, masks, self.peer.results, self.fixed)


class _Units:
    def __init__(self, draws: Sequence[_Draw]) -> None:
        self._draws = iter(draws)

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        draw = next(self._draws)
        return Correlations(draw.own, draw.results)


@dataclass(frozen=True)
class _Fresh:
    """Fresh words of a party, of which the lowest `bits` bits can reach a message."""

    words: np.ndarray
    bits: int


class Replay:
    """One party's half of a run, to be run again.

    `used`: the bits of its messages that count. One that is zero whatever the shares and the
    randomness fills up a byte, and does not.
    """

    def __init__(self, op: ProtocolOp, case: Case, rank: int) -> None:
        outcome = run_op(op, case)
        self._op, self._static, self._rank = op, case.static, rank
        self._kind: type[Party] = Party
        self._inputs = outcome.inputs[rank]
        self._incoming = [m.tobytes() for m in outcome.views[rank].incoming]
        # Copies, to be changed in place.
        self._own = [np.array(words) for words in outcome.fresh[rank].own]
        taken = (outcome.fresh[r].taken for r in (rank, 1 - rank))
        self.draws = [_drawn(own, peer) for own, peer in zip(*taken, strict=True)]
        self.used = -1
        used = self.sent()
        for _ in range(_PADDING_RUNS):
            used |= self._with_all_else_changed().sent()
        self.used = used
        self.total = used.bit_count()

    def sent(self) -> int:
        """Run the party again and return the bits that count of all that it sends, as one
        number.
        """
        tape = _Tape(self._incoming)
        party = self._kind(
            self._rank, tape, _Again(self._own), FRAC_BITS, _Units(self.draws), common_stream()
        )
        self._op.run(party, self._inputs, self._static)
        return int.from_bytes(b"".join(tape.sent), "little") & self.used

    def fresh(self) -> list[_Fresh]:
        """Return this party's fresh words, each once."""
        fresh = [_Fresh(words, 64) for words in self._own if words.size]
        fresh += [array for draw in self.draws for array in self.fresh_of(draw)]
        once = {id(array.words): array for array in fresh}
        return [self.reaching(array) for array in once.values()]

    def fresh_of(self, draw: _Draw) -> list[_Fresh]:
        """Return this party's masks in one draw of prepared units."""
        return [
            _Fresh(_source(words), part.form.bits)
            for part, words in zip(draw.correlation.masks, draw.own, strict=True)
            if words.size
            and part.is_held_by(self._rank)
            and words.flags.writeable | (words.base is not None)
        ]

    def change(self, base: int, flips: Sequence[tuple[np.ndarray, np.ndarray | np.uint64]]) -> int:
        """Return what flipping bits of fresh words changes in the messages."""
        self._flip(flips)
        changed = self.sent() ^ base
        self._flip(flips)
        return changed

    def reaching(self, array: _Fresh) -> _Fresh:
        """Return `array` without the upper bits that reach no message, such as those of a narrow
        word's mask.
        """
        base, low, high = self.sent(), 0, array.bits
        while low < high:
            middle = (low + high) // 2
            if self.change(base, [(array.words, _mask(array.bits) - _mask(middle))]):
                low = middle + 1
            else:
                high = middle
        return _Fresh(array.words, low)

    def by(self, kind: type[Party]) -> Replay:
        """Return this replay by a party that spoils its masks."""
        return self._changed(_kind=kind)

    def dropped(self, at: int) -> Replay:
        """Return this replay with zeros for the masks of a draw: broken."""
        return self._with_masks(at, [_frozen(np.zeros_like(m)) for m in self.draws[at].own])

    def repeated(self, at: int) -> Replay | None:
        """Return this replay with repeating masks in a draw: those of the last draw before of as
        many units of its correlation, or else of its own first unit throughout: broken. None for a
        single unit that no such draw precedes.
        """
        draw = self.draws[at]
        for before in reversed(self.draws[:at]):
            if before.correlation is draw.correlation and len(before.own[0]) == len(draw.own[0]):
                return self._with_masks(at, before.own)
        if len(draw.own[0]) < 2:
            return None
        return self._with_masks(at, [np.broadcast_to(np.array(m[:1]), m.shape) for m in draw.own])

    def _with_masks(self, at: int, masks: list[np.ndarray]) -> Replay:
        draws = list(self.draws)
        draws[at] = dataclasses.replace(draws[at], own=masks)
        draws[at].settle()
        return self._changed(draws=draws)

    def _flip(self, flips: Sequence[tuple[np.ndarray, np.ndarray | np.uint64]]) -> None:
        flipped = [words for words, _ in flips]
        for words, flip in flips:
            words ^= flip
        for draw in self.draws:
            if any(np.may_share_memory(m, f) for m in draw.own for f in flipped if m.size):
                draw.settle()

    def _with_all_else_changed(self) -> Replay:
        """Return this replay with the messages that come in as they were, other shares and other
        randomness.
        """
        prg = Prg.from_os()

        def other(draw: _Draw) -> _Draw:
            masks = draw.correlation.draw(self._rank, prg, len(draw.own[0]))
            results = [prg.words(words.shape) for words in draw.results]
            return dataclasses.replace(draw, own=masks, results=results)

        return self._changed(
            _inputs=[_other_share(v, prg) for v in self._inputs],
            _own=[prg.words(words.shape) for words in self._own],
            draws=[other(draw) for draw in self.draws],
        )

    def _changed(self, **attributes: Any) -> Replay:
        twin = copy.copy(self)
        twin.__dict__.update(attributes)
        return twin


def _drawn(own: Taken, peer: Taken) -> _Draw:
    assert own.correlation is peer.correlation
    masks = [np.array(m) for m in own.correlations.masks]
    fixed = own.fixed if own.fixed is not None else peer.fixed
    return _Draw(own.correlation, masks, own.correlations.results, peer.correlations, fixed)


def _frozen(words: np.ndarray) -> np.ndarray:
    """Make words read-only, by which they are known not to be fresh."""
    words.flags.writeable = False
    return words


def _source(words: np.ndarray) -> np.ndarray:
    """Return the one unit's words that `words` repeat; `words` itself where it repeats none."""
    return words if words.base is None else np.asarray(words.base)


def _other_share(value: Value, prg: Prg) -> Value:
    if isinstance(value, Arith | Bool):
        return dataclasses.replace(value, words=prg.words(value.shape))
    return value


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def too_few(replay: Replay) -> str:
    """Return what is wrong where the words that reach a message have fewer bits than the messages,
    or "". It takes as many replays as there are fresh words: for many rows.
    """
    base, available = replay.sent(), 0
    for array in replay.fresh():
        flat = array.words.reshape(-1)
        flips = ((flat[i : i + 1], _mask(array.bits)) for i in range(flat.size))
        available += array.bits * sum(bool(replay.change(base, [flip])) for flip in flips)
    if available < replay.total:
        return f"{replay.total} bits are sent under {available} fresh ones"
    return ""


def unhidden(replay: Replay) -> str:
    """Return what is wrong with how the party hides what it sends; "" for nothing. It takes as many
    replays as messages have bits: for few rows.
    """
    fresh = replay.fresh()
    available = sum(array.words.size * array.bits for array in fresh)
    if available < replay.total:
        return f"{replay.total} bits are sent under {available} fresh ones"
    base = replay.sent()
    basis: dict[int, int] = {}
    for array in fresh if replay.total else ():
        flat = array.words.reshape(-1)
        for bit in range(array.bits):
            for i in range(flat.size):
                insert(basis, replay.change(base, [(flat[i : i + 1], np.uint64(1 << bit))]))
                if len(basis) == replay.total:
                    return ""
    return f"of {replay.total} bits sent, fresh ones move {len(basis)}" if replay.total else ""


def insert(basis: dict[int, int], vector: int) -> bool:
    """Add a vector over F_2 to a basis, by leading bit; False when it is spanned already."""
    while vector:
        lead = vector.bit_length()
        if lead not in basis:
            basis[lead] = vector
            return True
        vector ^= basis[lead]
    return False


# ---- prepared units, broken one draw at a time


def twice(op: ProtocolOp) -> ProtocolOp:
    """Return an op that calls `op` two times and gives the second result."""

    def two_party(party: Party, *inputs: Value, **static: Any) -> Any:
        op.two_party(party, *inputs, **static)
        return op.two_party(party, *inputs, **static)

    return dataclasses.replace(op, two_party=two_party, model=None)


def uncaught(op: ProtocolOp, case: Case, rank: int, repeats: bool) -> tuple[int, list[str]]:
    """Break the masks of each draw of the party's alone; return how many breaks were tried, and the
    ones that `unhidden` has nothing against. `repeats`: also by masks used before.
    """
    replay = Replay(op, case, rank)
    if not replay.total:
        return 0, []
    tried, missed = 0, []
    for i, draw in enumerate(replay.draws):
        if not replay.fresh_of(draw):
            continue
        for how, broken in (
            ("dropped", replay.dropped(i)),
            ("repeated", replay.repeated(i) if repeats else None),
        ):
            if broken is not None:
                tried += 1
                if not unhidden(broken):
                    missed.append(f"{how} masks of {draw.correlation.name!r}, draw {i}")
    return tried, missed
