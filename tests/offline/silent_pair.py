"""Both parties of silent products, over a pair of queues; for their tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spu_llm.core.channel import CountingChannel, MemoryChannel
from spu_llm.core.correlation import Correlation, Correlations, Form, Part
from spu_llm.core.errors import WireError
from spu_llm.core.integers import Factor, factor_from
from spu_llm.core.meter import Meter
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.offline.durable import open_folder
from spu_llm.offline.silent.cache import HintCache
from spu_llm.offline.silent.products import SilentProducts
from spu_llm.offline.silent.ring import N

RANKS = (CLIENT, PROVIDER)
HALF = N // 2


def correlation_of(k: int, m: int, name: str = "matrix", chunk: int = HALF) -> Correlation:
    return Correlation(
        f"{name} {k} {m}",
        masks=(Part((k,), Owner.CLIENT, Form.PRIVATE),),
        results=(Part((m,), Owner.JOINT, Form.ARITH),),
        secure=lambda r, w: [r @ w],
        fixed=Part((k, m), Owner.PROVIDER, Form.PRIVATE),
        chunk=chunk,
    )


def matrix(seed: int, k: int, m: int, bits: int = 18) -> np.ndarray:
    """Draw whole numbers below 2^bits in size: doubles, or words when doubles cannot multiply
    them.
    """
    drawn = Prg.from_seed(seed, "matrix").uniform((k, m)) * 2 - 1
    whole = np.rint(drawn * 2.0**bits)
    return whole if bits <= 24 else whole.astype(np.int64).view(np.uint64)


def words_of(w: np.ndarray) -> np.ndarray:
    return w if w.dtype == np.uint64 else w.astype(np.int64).view(np.uint64)


def fixed(rank: int, w: np.ndarray) -> Factor | None:
    """Return the provider's matrix, as each party gives it."""
    return factor_from(w) if rank == PROVIDER else None


class Wire:
    """One end of a memory channel: keeps what was sent, and can change it on the way."""

    def __init__(self, inner: MemoryChannel) -> None:
        self.inner = inner
        self.sent: list[bytes] = []
        self.change: Callable[[int, bytes], bytes] = lambda number, data: data

    def send(self, data: bytes) -> None:
        data = self.change(len(self.sent), data)
        self.sent.append(data)
        self.inner.send(data)

    def recv(self) -> bytes:
        data = self.inner.recv()
        if data == b"gone":
            raise WireError("the other party is gone")
        return data

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class Two:
    """A session of two parties."""

    def __init__(
        self,
        client: Path | None = None,
        provider: Path | None = None,
        *,
        seed: int | None = None,
        jobs: int = 1,
        most_bytes: int = 10**9,
    ) -> None:
        """Connect both parties.

        client: the client's folder for this provider, in one for all. provider: the folder of the
        version. seed: fixes both parties' own streams, which are random without. most_bytes: of all
        hints.
        """
        cache = [] if client is None else [HintCache(client, most_bytes)]
        if client is not None and not client.parent.exists():
            open_folder(client.parent)
        self.wires = [Wire(end) for end in MemoryChannel.pair()]
        self.meters = [Meter(), Meter()]
        self.products = [
            SilentProducts(
                rank,
                Prg.from_os() if seed is None else Prg.from_seed(seed, f"own {rank}"),
                CountingChannel(self.wires[rank]),
                self.meters[rank],
                directory=(client, provider)[rank],
                jobs=jobs,
                **({"receiving": cache[0].receiving} if cache else {}),
            )
            for rank in RANKS
        ]

    def outcomes(self, work: Callable[[int, SilentProducts], Any]) -> list[Any]:
        """Return what `work` returns or raises at each party."""
        collected: list[Any] = [None, None]

        def run(rank: int) -> None:
            try:
                collected[rank] = work(rank, self.products[rank])
            except Exception as exc:
                collected[rank] = exc
                self.wires[rank].inner.send(b"gone")

        thread = threading.Thread(target=run, args=(PROVIDER,))
        thread.start()
        run(CLIENT)
        thread.join()
        return collected

    def both(self, work: Callable[[int, SilentProducts], Any]) -> list[Any]:
        outcomes = self.outcomes(work)
        errors = [x for x in outcomes if isinstance(x, Exception)]
        for error in sorted(errors, key=lambda e: "is gone" in str(e)):
            raise error
        return outcomes

    def set_up(self, *wanted: tuple[Correlation, np.ndarray]) -> None:
        self.both(lambda rank, p: p.set_up([(c, fixed(rank, w)) for c, w in wanted]))

    def take(self, correlation: Correlation, units: int, w: np.ndarray) -> list[Correlations]:
        return self.both(lambda rank, p: p.take(correlation, units, fixed(rank, w)))

    def errors(self, correlation: Correlation, units: int, w: np.ndarray) -> np.ndarray:
        """Return how far the shares' sum is from r W in the results of some units, int64."""
        client, provider = self.take(correlation, units, w)
        (r,), (mine,), (theirs,) = client.masks, client.results, provider.results
        assert not provider.masks[0].any() and provider.masks[0].shape == r.shape
        assert r.shape == (units, w.shape[0]) and mine.shape == theirs.shape == (units, w.shape[1])
        return (mine + theirs - r @ words_of(w)).view(np.int64)

    def sent(self, rank: int) -> list[int]:
        """Bytes of the messages of one party so far."""
        return [len(data) for data in self.wires[rank].sent]


def chi_square(counts: np.ndarray, expected: np.ndarray | float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def looks_uniform(data: np.ndarray) -> bool:
    """Bytes [...]: chi-square over 256 values, within 8 standard deviations of its mean: uniform
    ones fail once in some 10^10 times, so that a test may look at a hundred.
    """
    counts = np.bincount(data.reshape(-1), minlength=256)
    return abs(chi_square(counts, data.size / 256) - 255) < 8 * np.sqrt(2 * 255)


def forbid_numpys_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("numpy's randomness")

    for name in dir(np.random):
        if name.islower() and callable(getattr(np.random, name)):
            monkeypatch.setattr(np.random, name, forbidden)
    with pytest.raises(AssertionError):
        np.random.default_rng()
