"""Silent products: masks of the client's times the provider's weights, as many as wanted, for
nothing but a key of 16 kB.

For a matrix W [inputs, outputs] of the provider's the parties get masks r_j of the client's and
additive shares of sum_j r_j W_jo, one for each of N *positions*: coefficients of polynomials modulo
X^N + 1 and q (`silent.ring`). Scalars multiply polynomials coefficient by coefficient, so W meets
N positions at once, and every position goes its own way afterwards.

Public, from streams of fixed labels (`rlwe.public`): a_j for every input of every matrix, and p.

  1. Once per matrix, the provider: A_o = sum_j W_jo a_j, and the *hint* A_o + p u_o + e'_o, with
     u_o ternary and e'_o noise of its own (`silent.hint`). It goes to every client, once.
  2. Once per N positions, the client: s ternary and fresh; its *key* P = p s + e_p goes to the
     provider. It serves all matrices.
  3. Masks: r_j = -(a_j s + e_j), with fresh noise e_j. Nobody sends them. The client's share of
     r W is -hint s, a multiple of 2^24: its low bits mask nothing.
  4. The provider's share is P u_o + e''_o, e'' uniform of WIDE_BITS bits.

Error. The shares add up to r W + W^T e + e_p u + e'' - e' s - d s, d what rounding leaves out of
the hint. `protocols.arithmetic.product.linear` lifts its inputs by L bits and truncates 18 + L
bits. In units of its last place the standard deviation is then, |w| being the length of W's column:

    W^T e           3.24 * 2^10 * 2^18 |w| / 2^(18 + L)     0.81 |w| for L = 12
    d s             2^27.4 / 2^(18 + L)                     0.17
    e''             2^(WIDE_BITS - 1.8) / 2^(18 + L)        0.009
    e_p u and e' s  2^16.9 / 2^(18 + L)                     0.0001

What each party learns. The provider sees P and, online, x_j - r_j = x_j + a_j s + e_j: RLWE samples
under s, as many as there are inputs of matrices, each position once. If RLWE with ternary secrets
is hard, they are uniform to it. The client sees hints: samples under u_o, one for each u_o, all
with the public p. They are uniform to it by the same assumption and say nothing of A. Beside that,
a client tells the provider which of its hints it has kept: whether it was here before. Digests of
hints tell the client nothing of which matrices two models or versions share (`silent.store`).

Conditions, each with a test (tests/offline/test_silent_conditions.py):
  - a_j and p come from strings that neither party chooses: p = 0 would show A.
  - One a_j serves one input of one matrix under one s. Inputs of several matrices are one matrix.
  - u_o belongs to one output, matrix and version of the weights (`hint.Secrets`): two hints with
    one u differ by what the weights do.
  - A position under one s is used once. A matrix's positions are counted upwards, before anything
    is made of them. s is never stored; a copy of a running machine has it, as it has all masks.
  - Nobody opens a raw product. The client's share is linear in s, and N numbers of it, without the
    provider's noise to hide them, are s. The same holds of the provider's share and u.
  - A truncated product is opened to the client alone. Its last place still depends on d s, and the
    provider knows d. Who also knows x finds s by regression, from a million or so numbers under one
    key. For the client, e_p u lies 2^13 times below the last place, and e'' is 2^8 times as wide:
    it would need some 2^33 numbers of one output, and far fewer give W itself.

Gaps, stated:
  - Circular: results depend on e and s by their error, so later messages encrypt values that
    depend, in the last place, on the key that encrypts them. No attack is known.
  - One for all: a_j and p are the same for all sessions, so that work on their lattice serves
    against all keys and hints. The price of an attack is paid once (for its size: `silent.ring`).
  - Semi-honest parties. A provider that sends wrong hints puts a function of s into results; a
    client that sends a wrong P puts one of u there. Neither is noticed. Either sees it only in what
    is opened to it: a little at a time where that is tokens, wholesale where it is rows
    (`split --mode mpc`). There one P + c of a client adds c times coefficient i of every u_o to row
    i of the last product, and the N rows under that key show the u_o of all its outputs at once:
    what masks them in the hint (tests/offline/test_silent_conditions.py). What is left there, A_o +
    e'_o, are linear equations in W's column alone, solved at once where W has few inputs, by
    lattices where it has many. For W that is no new kind of gap: a client may send wrong x, too,
    and a row that is opened then shows one of W.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spu_llm.core.channel import CountingChannel, recv_exactly
from spu_llm.core.correlation import Correlation, Correlations, cut, joined
from spu_llm.core.errors import PoolError, WireError
from spu_llm.core.integers import Factor, equal
from spu_llm.core.meter import Meter
from spu_llm.core.parallel import for_each
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.offline import durable
from spu_llm.offline.pool import no_units
from spu_llm.offline.silent import hint as hints
from spu_llm.offline.silent import ring, store
from spu_llm.offline.silent.hint import Matrix, slices
from spu_llm.offline.silent.ring import N

WIDE_BITS = 25  # of e'', in a word
_PIECE = 1 << 22  # bytes of a hint in one message
_NO_HINT = np.empty((0, N, hints.BYTES), np.uint8)

# By SHA-256 in hex and bytes of hints that are needed: whether those that lack may be written to
# the directory until the block ends.
Receiving = Callable[[Sequence[tuple[str, int]]], AbstractContextManager[bool]]


def matrix_of(correlation: Correlation) -> Matrix:
    assert correlation.fixed is not None
    return Matrix(correlation.name, *correlation.fixed.shape)


@dataclass
class _Use:
    """A matrix in a session: its hint, and the positions made of it and not yet taken."""

    matrix: Matrix
    hint: np.ndarray  # bytes [outputs, N, 5]; empty at the provider
    own: hints.Secrets | None = None  # at the provider
    fixed: Factor | None = None  # at the provider
    key: int = 0  # number of the key that the next position is under
    next: int = 0  # that position
    made: list[Correlations] = field(default_factory=list)

    @property
    def left(self) -> int:
        return sum(len(m.results[0]) for m in self.made)


class SilentProducts:
    """This party's half, for one session. Both parties make and take the same positions of the same
    matrices in the same order.

    `make` may run in one other thread while positions are taken: what it gives is not there before
    `add`.
    """

    def __init__(
        self,
        rank: int,
        own: Prg,
        channel: CountingChannel,
        meter: Meter,
        *,
        directory: Path | None = None,
        receiving: Receiving = lambda wanted: nullcontext(False),
        on_hint: Callable[[int, int], None] = lambda done, total: None,
        jobs: int = 1,
    ) -> None:
        """Take `own`: this party's secret stream. `directory`: where hints outlive the session, of
        the peer or, at the provider, of the model's version. `receiving`: at the client, makes room
        for hints (`cache.HintCache.receiving`). on_hint(done, total) hears there of bytes that have
        come. `jobs`: cores.
        """
        self._jobs = jobs
        self.rank, self._own, self._channel, self._meter = rank, own, channel, meter
        self._directory, self._receiving = directory, receiving
        if directory is not None:
            durable.open_folder(directory)
        self._provider_key = store.provider_key(directory) if rank != CLIENT else b""
        self._uses: dict[str, _Use] = {}
        self._keys: list[np.ndarray] = []  # s at the client, P at the provider
        self._on_hint = on_hint

    # ---- step 1

    def set_up(self, wanted: Sequence[tuple[Correlation, Factor | None]]) -> None:
        """Bring the hints of matrices to the client where it lacks them: a message each way for all
        of them, and the pieces. `wanted`: each with the provider's matrix, which only it has.

        PoolError when a hint is damaged, or a matrix is not what it was.
        """
        missing = {}
        for correlation, fixed in wanted:
            assert (fixed is None) == (self.rank == CLIENT), correlation.name
            use = self._uses.get(correlation.name)
            if use is None:
                missing[correlation.name] = correlation, fixed
            elif use.matrix != matrix_of(correlation) or not equal(use.fixed, fixed):
                raise PoolError(f"{correlation.name} is asked for with other weights than before")
        if not missing:
            return
        with self._metered("hint", f"hints of {len(missing)} matrices"):
            if self.rank == CLIENT:
                self._receive([matrix_of(c) for c, _ in missing.values()])
            else:
                self._offer(list(missing.values()))

    @contextmanager
    def _metered(self, kind: str, name: str) -> Iterator[None]:
        """Record the time and traffic of the block as offline, wherever it falls."""
        before = dataclasses.replace(self._channel.traffic)
        with self._meter.in_phase("offline"):
            started = time.perf_counter()
            yield
            seconds = time.perf_counter() - started
            self._meter.record(kind, name, "", seconds, self._channel.traffic.since(before))

    def _offer(self, missing: list[tuple[Correlation, Factor | None]]) -> None:
        """Tell the client the SHA-256 of all hints; hear how much it has of each; send the rest."""
        offered = []
        for correlation, fixed in missing:
            matrix = matrix_of(correlation)
            assert fixed is not None
            own = hints.Secrets(self._provider_key, matrix, fixed.digest)
            stored = store.load_own(self._directory, own.name, matrix.hint_bytes)
            if stored is None:
                made = hints.make(matrix, fixed, own, self._jobs)
                stored = store.save_own(self._directory, own.name, made)
            offered.append((_Use(matrix, _NO_HINT, own, fixed), stored))
        self._channel.send(b"".join(hint.digest for _, hint in offered))
        held = np.frombuffer(recv_exactly(self._channel, 8 * len(offered)), np.uint64).tolist()
        for start, (_, hint) in zip(held, offered, strict=True):
            if start > hint.content.size:
                raise WireError(f"the client has {start} bytes of a hint of {hint.content.size}")
        for start, (use, hint) in zip(held, offered, strict=True):
            if start < hint.content.size:
                hint.check()
            for at in range(start, hint.content.size, _PIECE):
                self._channel.send(hint.content[at : at + _PIECE].tobytes())
            self._uses[use.matrix.name] = use

    def _receive(self, missing: list[Matrix]) -> None:
        total = sum(matrix.hint_bytes for matrix in missing)
        self._on_hint(0, total)
        sums = recv_exactly(self._channel, 32 * len(missing))
        wanted = [
            (sums[32 * i : 32 * i + 32].hex(), matrix.hint_bytes)
            for i, matrix in enumerate(missing)
        ]
        with self._receiving(wanted) as keep:
            columns = [
                store.Received(
                    self._directory, sums[32 * i : 32 * i + 32], matrix.hint_bytes, keep=keep
                )
                for i, matrix in enumerate(missing)
            ]
            self._channel.send(np.array([f.held for f in columns], np.uint64).tobytes())
            done = sum(f.held for f in columns)
            for matrix, received in zip(missing, columns, strict=True):
                for at in range(received.held, received.size, _PIECE):
                    self._on_hint(done, total)
                    piece = recv_exactly(self._channel, min(_PIECE, received.size - at))
                    received.add(piece)
                    done += len(piece)
                content = received.finish().reshape(matrix.outputs, N, hints.BYTES)
                self._uses[matrix.name] = _Use(matrix, content)
        self._on_hint(total, total)

    # ---- steps 2 to 4

    def available(self, correlation: Correlation) -> int:
        """Return how many positions are made and not taken."""
        use = self._uses.get(correlation.name)
        return use.left if use is not None else 0

    def prepare(self, correlation: Correlation, units: int, fixed: Factor | None = None) -> None:
        """Make positions until `units` are there."""
        self.set_up([(correlation, fixed)])
        while self.available(correlation) < units:
            self.add(correlation, self.make(correlation))

    def make(self, correlation: Correlation) -> Correlations:
        """Make the next positions of a matrix that is set up, for `add`: a chunk, or as many as are
        left under its key.
        """
        use = self._uses[correlation.name]
        with self._metered("pool", correlation.name):
            if use.key == len(self._keys):
                self._keys.append(self._next_key())
            key, window = self._keys[use.key], slice(use.next, min(use.next + correlation.chunk, N))
            # Counted before anything is made of them.
            use.next = window.stop % N
            use.key += use.next == 0
            return self._positions(use, key, window)

    def add(self, correlation: Correlation, made: Correlations) -> None:
        """Let positions of `made` serve from now on."""
        self._uses[correlation.name].made.append(made)

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        """Return masks [units, inputs] (zeros at the provider) and this party's shares
        [units, outputs] of their products; nobody ever gets them again.
        """
        self.prepare(correlation, units, fixed)
        use, pieces, missing = self._uses[correlation.name], [], units
        while missing:
            first = use.made.pop(0)
            count = min(missing, len(first.results[0]))
            pieces.append(cut(first, 0, count))
            missing -= count
            if count < len(first.results[0]):
                use.made.insert(0, cut(first, count))
        return joined(pieces) if pieces else no_units(correlation)

    def _next_key(self) -> np.ndarray:
        """Draw s and send P, at the client, or receive P, and return s [N] or P [N] (step 2)."""
        if self.rank == CLIENT:
            s = ring.ternary(self._own, 1)[0]
            base = hints.public_key_base()[None]
            key = ring.exact_product(base, ring.transform(s))[0] + ring.noise(self._own, (N,))
            self._channel.send(key.tobytes())
            return s
        return np.frombuffer(recv_exactly(self._channel, 8 * N), np.uint64)

    def _positions(self, use: _Use, key: np.ndarray, window: slice) -> Correlations:
        """Make the positions `window` under one key (steps 3 and 4)."""
        matrix, count = use.matrix, window.stop - window.start
        masks = np.zeros((count, matrix.inputs), np.uint64)
        share = np.empty((count, matrix.outputs), np.uint64)
        columns = ring.columns(key, window)
        if self.rank != CLIENT:
            columns = ring.halves(columns)

        def mask(drawn: tuple[slice, np.ndarray]) -> None:
            rows, noise = drawn
            a = hints.public_inputs(matrix, rows.start, rows.stop - rows.start)
            hidden = ring.words_times(a, columns) + noise
            masks[:, rows] = (np.uint64(0) - hidden).T

        def own_share(rows: slice) -> None:
            share[:, rows] = (np.uint64(0) - hints.times(use.hint[rows], columns)).T

        def others_share(rows: slice) -> None:
            assert use.own is not None
            share[:, rows] = ring.small_times(use.own.small(rows), columns).T

        if self.rank == CLIENT:
            rows_and_noise = (
                (rows, ring.noise(self._own, (rows.stop - rows.start, count)))
                for rows in slices(matrix.inputs)
            )
            for_each(self._jobs, mask, rows_and_noise)
            for_each(self._jobs, own_share, slices(matrix.outputs))
            return Correlations([masks], [share])
        for_each(self._jobs, others_share, slices(matrix.outputs))
        wide = self._own.words(share.shape) >> np.uint64(64 - WIDE_BITS)
        share += wide - np.uint64(1 << WIDE_BITS >> 1)
        return Correlations([masks], [share])
