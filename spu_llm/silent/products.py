"""Silent products: masks of the client's times the provider's weights, as many as wanted, for
nothing but a key of 16 kB.

For a matrix W [inputs, outputs] of the provider's the parties get masks r_j of the client's and
additive shares of sum_j r_j W_jo, one for each of N *positions*: coefficients of polynomials modulo
X^N + 1 and q (`silent.ring`). Scalars multiply polynomials coefficient by coefficient, so W meets
N positions at once, and every position goes its own way afterwards.

Public, from SHAKE128 over fixed labels: a_j for every input of every matrix, and p.

  1. Once per matrix, the provider: A_o = sum_j W_jo a_j, and the *hint* A_o + p u_o + e'_o, with
     u_o ternary and e'_o noise of its own (`silent.hint`). It goes to every client, once.
  2. Once per N positions, the client: s ternary and fresh; its *key* P = p s + e_p goes to the
     provider. It serves all matrices.
  3. Masks: r_j = -(a_j s + e_j), with fresh noise e_j. Nobody sends them. The client's share of
     r W is -hint s.
  4. The provider's share is P u_o + e''_o, e'' uniform and wide.

The shares add up to r W + W^T e + e_p u + e'' - e' s - (what the hint leaves out) s. All of that is
small: a result is off by `ring.NOISE` times the length of W's column, and WIDE. A product for
inputs lifted by some bits, which a truncation takes away again with the noise, is right in its last
place (`protocols.product.linear`).

What each party learns. The provider sees P and, online, x_j - r_j = x_j + a_j s + e_j: RLWE samples
under s, as many as there are inputs of matrices, each position once. By decision RLWE with ternary
secrets they are uniform to it. The client sees hints: samples under u_o, one u_o each, all with the
public p; by the same assumption they are uniform and say nothing of A. No key P that a client sends
shows more, since the provider's share P u + e'' never leaves it but masked.

Conditions, each with a test (tests/core/test_silent_attacks.py):
  - a_j and p come from strings that neither party chooses: p = 0 would show A, and so W.
  - One a_j serves one input of one matrix under one s. Inputs of several matrices are one matrix.
  - u_o belongs to one output, matrix and version of the weights (`hint.Secrets`): two hints with
    one u differ by the difference of the weights.
  - A position under one s is used once. s lives in one session and is never stored, so nothing can
    roll it back; a matrix's positions are counted upwards.
  - Nobody opens a raw product: the client's share is linear in s and some hundred openings to the
    provider would give it. `linear` truncates, and e'' covers what the client could see of e_p u
    and e' s in the last place of a truncated result, which never comes near it: WIDE is 2^-6 of
    that place.

Gap, stated: what follows is computed from results that depend on e and s (by W^T e, in their last
place), so that later messages encrypt values that depend, in the last place, on the key. No attack
is known; circular security is assumed, as everywhere where noise is not flooded.

Semi-honest parties: a provider that sends wrong hints sees effects of s in what it can observe, one
coefficient at a time; one whose `x` is openly visible nowhere, as with hidden progress, has little
to look at.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spu_llm.channel import CountingChannel
from spu_llm.correlation import Correlation, Material, digest
from spu_llm.errors import PoolError, WireError
from spu_llm.integers import factor_from
from spu_llm.meter import Meter
from spu_llm.prg import Prg
from spu_llm.silent import hint as hints
from spu_llm.silent import ring, store
from spu_llm.silent.hint import Matrix, slices
from spu_llm.silent.ring import N
from spu_llm.values import CLIENT

WIDE_BITS = 25  # of e'', in a word
_PIECE = 1 << 22  # bytes of a hint in one message


def matrix_of(correlation: Correlation) -> Matrix:
    assert correlation.fixed is not None
    return Matrix(correlation.name, *correlation.fixed.shape)


@dataclass
class _Use:
    """A matrix in a session: its hint, and the positions made of it and not yet taken."""

    matrix: Matrix
    hint: np.ndarray  # bytes [outputs, N, 5]; empty at the provider
    own: hints.Secrets | None  # at the provider
    weights: str = ""  # digest, at the provider
    key: int = 0  # number of the key that the next position is under
    next: int = 0  # that position
    made: list[Material] = field(default_factory=list)

    @property
    def left(self) -> int:
        return sum(len(m.results[0]) for m in self.made)


class SilentProducts:
    """This party's half, for one session. Both parties make and take the same positions of the same
    matrices in the same order.
    """

    def __init__(
        self,
        rank: int,
        own: Prg,
        channel: CountingChannel,
        meter: Meter,
        *,
        directory: Path | None = None,
    ) -> None:
        """`own`: this party's secret stream. `directory`: where hints outlive the session."""
        self.rank, self._own, self._channel, self._meter = rank, own, channel, meter
        self._directory = directory
        if directory is not None:
            store.open_directory(directory)
        self._provider_key = store.provider_key(directory) if rank != CLIENT else b""
        self._uses: dict[str, _Use] = {}
        self._keys: list[np.ndarray] = []  # transforms of s at the client, of P at the provider
        self._digests: dict[str, tuple[np.ndarray, str]] = {}
        # Hears of bytes of hints that are there, and of all that are needed.
        self.on_hint: Callable[[int, int], None] = lambda done, total: None

    # ---- step 1

    def set_up(self, wanted: Sequence[tuple[Correlation, np.ndarray | None]]) -> None:
        """Bring the hints of matrices to the client where it lacks them: three messages for all of
        them, and their pieces. `wanted`: each with the provider's words, which only it has.

        PoolError when a hint is damaged, or a matrix is not what it was.
        """
        missing = {}
        for correlation, fixed in wanted:
            weights = self._digest(correlation.name, fixed)
            use = self._uses.get(correlation.name)
            if use is None:
                missing[correlation.name] = correlation, fixed, weights
            elif use.weights != weights:
                raise PoolError(f"{correlation.name} is asked for with other weights than before")
        if not missing:
            return
        with self._metered("hint", f"hints of {len(missing)} matrices"):
            if self.rank == CLIENT:
                self._receive([matrix_of(c) for c, _, _ in missing.values()])
            else:
                self._offer(list(missing.values()))

    @contextmanager
    def _metered(self, kind: str, name: str) -> Iterator[None]:
        """Offline, wherever it falls."""
        before = dataclasses.replace(self._channel.traffic)
        with self._meter.in_phase("offline"):
            started = time.perf_counter()
            yield
            seconds = time.perf_counter() - started
            self._meter.record(kind, name, "", seconds, self._channel.traffic.since(before))

    def _offer(self, missing: list[tuple[Correlation, np.ndarray | None, str]]) -> None:
        offered = []
        for correlation, fixed, weights in missing:
            matrix = matrix_of(correlation)
            assert fixed is not None
            own = hints.Secrets(self._provider_key, matrix, weights)
            name = own.name
            found = store.load_own(self._directory, name, matrix.hint_bytes)
            if found is None:
                made = hints.make(matrix, factor_from(fixed), own)
                found = store.save_own(self._directory, name, made)
            offered.append((matrix, own, weights, *found))
        self._channel.send(b"".join(sum_ for _, _, _, sum_, _ in offered))
        held = np.frombuffer(self._received(8 * len(offered)), np.uint64)
        for (matrix, own, weights, _, content), start in zip(offered, held.tolist(), strict=True):
            if start > content.size:
                raise WireError(f"the client has {start} bytes of a hint of {content.size}")
            for at in range(start, content.size, _PIECE):
                self._channel.send(content[at : at + _PIECE].tobytes())
            nothing = np.empty((0, N, hints.BYTES), np.uint8)
            self._uses[matrix.name] = _Use(matrix, nothing, own, weights)

    def _receive(self, missing: list[Matrix]) -> None:
        total = sum(matrix.hint_bytes for matrix in missing)
        self.on_hint(0, total)
        sums = self._received(32 * len(missing))
        found = [
            store.Received(self._directory, sums[32 * i : 32 * i + 32], matrix.hint_bytes)
            for i, matrix in enumerate(missing)
        ]
        self._channel.send(np.array([f.held for f in found], np.uint64).tobytes())
        done = sum(f.held for f in found)
        for matrix, received in zip(missing, found, strict=True):
            for at in range(received.held, received.size, _PIECE):
                self.on_hint(done, total)
                piece = self._received(min(_PIECE, received.size - at))
                received.add(piece)
                done += len(piece)
            content = received.finish().reshape(matrix.outputs, N, hints.BYTES)
            self._uses[matrix.name] = _Use(matrix, content, None)
        self.on_hint(total, total)

    def _received(self, size: int) -> bytes:
        data = self._channel.recv()
        if len(data) != size:
            raise WireError(f"a message has {len(data)} bytes, expected {size}")
        return data

    # ---- steps 2 to 4

    def available(self, correlation: Correlation) -> int:
        """Positions that are made and not taken."""
        use = self._uses.get(correlation.name)
        return use.left if use is not None else 0

    def prepare(
        self, correlation: Correlation, units: int, fixed: np.ndarray | None = None
    ) -> None:
        """Make positions until `units` are there."""
        self.set_up([(correlation, fixed)])
        use = self._uses[correlation.name]
        while use.left < units:
            with self._metered("pool", correlation.name):
                self._make_some(use, correlation.chunk)

    def _make_some(self, use: _Use, count: int) -> None:
        """The next positions of a matrix; N of them are a whole number of times `count`."""
        if use.key == len(self._keys):
            self._keys.append(self._next_key())
        key, window = self._keys[use.key], slice(use.next, use.next + count)
        # Counted before anything is made of them.
        use.next = window.stop % N
        use.key += use.next == 0
        use.made.append(self._positions(use, key, window))

    def take(
        self, correlation: Correlation, units: int, fixed: np.ndarray | None = None
    ) -> Material:
        """Masks [units, inputs] (zeros at the provider) and this party's shares [units, outputs]
        of their products; nobody ever gets them again.
        """
        self.prepare(correlation, units, fixed)
        use, pieces, missing = self._uses[correlation.name], [], units
        while missing:
            first = use.made.pop(0)
            count = min(missing, len(first.results[0]))
            pieces.append(_cut(first, slice(0, count)))
            missing -= count
            if count < len(first.results[0]):
                use.made.insert(0, _cut(first, slice(count, None)))
        k, m = use.matrix.inputs, use.matrix.outputs
        empty = Material([np.empty((0, k), np.uint64)], [np.empty((0, m), np.uint64)])
        return _joined(pieces) if pieces else empty

    def _next_key(self) -> np.ndarray:
        """Step 2: the transform of s, or of P."""
        if self.rank == CLIENT:
            s = ring.transform(ring.ternary(self._own, 1)[0])
            base = hints.public_key_base()[None]
            key = ring.exact_product(base, s)[0] + ring.noise(self._own, (N,))
            self._channel.send(key.tobytes())
            return s
        key = np.frombuffer(self._received(8 * N), np.uint64)
        return ring.transform(ring.fractions(key))

    def _positions(self, use: _Use, key: np.ndarray, window: slice) -> Material:
        """Steps 3 and 4, for the positions `window` under one key."""
        matrix, count = use.matrix, window.stop - window.start
        masks = np.zeros((count, matrix.inputs), np.uint64)
        share = np.empty((count, matrix.outputs), np.uint64)
        if self.rank == CLIENT:
            for rows in slices(matrix.inputs):
                a = hints.public_inputs(matrix, rows.start, rows.stop - rows.start)
                hidden = ring.exact_product(a, key)[:, window]
                hidden += ring.noise(self._own, hidden.shape)
                masks[:, rows] = (np.uint64(0) - hidden).T
            for rows in slices(matrix.outputs):
                product = ring.product(hints.transformed(use.hint[rows]), key)[:, window]
                share[:, rows] = (np.uint64(0) - product).T
            return Material([masks], [share])
        assert use.own is not None
        for rows in slices(matrix.outputs):
            share[:, rows] = ring.product(key, use.own.small(rows))[:, window].T
        wide = self._own.words(share.shape) >> np.uint64(64 - WIDE_BITS)
        share += wide - np.uint64(1 << WIDE_BITS >> 1)
        return Material([masks], [share])

    def _digest(self, name: str, fixed: np.ndarray | None) -> str:
        """Of the provider's words; "" at the client."""
        if fixed is None:
            assert self.rank == CLIENT, f"{name}: the provider must give its matrix"
            return ""
        # Weights are large: the same array, which nobody writes into, is not read again.
        array, found = self._digests.get(name, (None, ""))
        if array is not fixed:
            found = digest(fixed)
            self._digests[name] = fixed, found
        return found


def _cut(material: Material, part: slice) -> Material:
    return Material([x[part] for x in material.masks], [x[part] for x in material.results])


def _joined(pieces: list[Material]) -> Material:
    if len(pieces) == 1:
        return pieces[0]
    masks = np.concatenate([p.masks[0] for p in pieces])
    return Material([masks], [np.concatenate([p.results[0] for p in pieces])])
