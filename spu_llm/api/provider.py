"""Where a private model is: with a provider elsewhere, or in a process on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spu_llm.core.errors import InputError
from spu_llm.core.parallel import MAX_JOBS, own_cores
from spu_llm.core.settings import BACKENDS, OWN
from spu_llm.core.values import CLIENT, PROVIDER, ROLES
from spu_llm.net.address import host_and_port
from spu_llm.net.identity import identity_in
from spu_llm.net.shaping import shape_of
from spu_llm.offline.defaults import HINT_CACHE_BYTES
from spu_llm.service.client import Server
from spu_llm.service.first_contact import KeptFormat, text_format, text_format_here
from spu_llm.service.launching import local_provider
from spu_llm.service.model_names import check_name


@dataclass(frozen=True)
class Provider:
    """Whoever listens at `server`, or, without one, a process for `model` on this machine; made by
    `Provider.at` and `Provider.here`.
    """

    network: str  # to emulate: "local" (none), "lan", "wan", or as "3000mbps-1ms"
    server: Server | None
    model: Path  # directory; of a process here
    pool: Path | None  # where correlated randomness outlives a session; see `client_pool`
    jobs: int  # cores of a party that make correlated randomness
    hint_cache: int = HINT_CACHE_BYTES  # bytes that the client's hints of all providers may take
    mark: Path | None = None  # the key of a process here that marks texts
    ranges: Path | None = None  # of a model here, where they do not lie beside it
    backend: str = OWN  # what computes forwards: "own", or "spu"; the same at both parties

    @staticmethod
    def here(
        model: Path | str,
        *,
        network: str = "local",
        pool: Path | str | None = None,
        jobs: int | None = None,
        ranges: Path | str | None = None,
        backend: str = OWN,
    ) -> Provider:
        """Return a provider that runs as a process on this machine for each session: a rehearsal,
        in which both parties are this user's.

        network: "local", "lan", "wan", or as "3000mbps-1ms", which is emulated. pool: directory of
        correlated randomness that outlives a session, of both parties. jobs: cores of each party
        that make it; half of them by default. ranges: file of `calibrate --out`; by default
        ranges.json beside the model. backend: what computes forwards, "own" or "spu". InputError
        for what cannot be used.
        """
        _check(network, jobs, HINT_CACHE_BYTES, backend)
        return Provider(
            network,
            None,
            Path(model),
            path_of(pool),
            own_cores(2) if jobs is None else jobs,
            ranges=path_of(ranges),
            backend=backend,
        )

    @staticmethod
    def at(
        address: str,
        *,
        identity: Path | str | None = None,
        trust: Path | str | None = None,
        insecure: bool = False,
        network: str = "local",
        pool: Path | str | None = None,
        jobs: int | None = None,
        hint_cache: int = HINT_CACHE_BYTES,
        backend: str = OWN,
        model: str = "",
    ) -> Provider:
        """Return the provider at HOST:PORT. identity: the directory of this party's certificate and
        key; trust: a file of certificates, of whom is trusted there; `insecure`, in place of both,
        for plain sockets on a machine that you trust. network: as of `here`, the same at both
        parties. pool: directory of the client's correlated randomness that outlives a session.
        jobs: cores that make it; all by default. hint_cache: bytes that the hints of all providers
        may take. backend: what computes forwards, as the provider has it. model: the name of the
        one that is asked for, of a provider with several; by default its first. InputError for what
        cannot be used.
        """
        _check(network, jobs, hint_cache, backend)
        if model:
            check_name(model, "model")
        own = identity_in(path_of(identity), path_of(trust), insecure=insecure)
        host, port = host_and_port(address, "the provider's address")
        server = Server(host, port, network, own, backend, model)
        return Provider(
            network,
            server,
            Path(),
            path_of(pool),
            own_cores(1) if jobs is None else jobs,
            hint_cache,
            backend=backend,
        )

    @property
    def halves(self) -> int:
        """Return how many parties' correlated randomness lies in `pool`."""
        return 1 if self.server is not None else len(ROLES)

    @property
    def client_pool(self) -> Path | None:
        """Return the client's directory: `pool`, or with a process here one in it."""
        return self.pool if self.server is not None else self._own_pools[CLIENT]

    @property
    def _own_pools(self) -> list[Path | None]:
        """Return both parties' directories."""
        return [self.pool and self.pool / role for role in ROLES]

    def text_format(self) -> KeptFormat:
        """Return how text of its model is written; errors as of `spu_llm.service.first_contact`."""
        return text_format_here(self.model) if self.server is None else text_format(self.server)

    @contextmanager
    def reached(self, sampling_seed: int | None = None) -> Iterator[tuple[Server, Path | None]]:
        """Yield where it listens and the client's directory. `sampling_seed`: of a process here."""
        if self.server is not None:
            yield self.server, self.client_pool
            return
        pool = self._own_pools[PROVIDER]
        with local_provider(
            self.model,
            self.network,
            sampling_seed=sampling_seed,
            pool=pool,
            jobs=self.jobs,
            mark=self.mark,
            ranges=self.ranges,
            backend=self.backend,
        ) as server:
            yield server, self.client_pool


def path_of(given: Path | str | None) -> Path | None:
    """Return a path that may be left out."""
    return None if given is None else Path(given)


def _check(network: str, jobs: int | None, hint_cache: int, backend: str) -> None:
    """Raise InputError for settings that no session has."""
    try:
        shape_of(network)
    except ValueError as exc:
        raise InputError(str(exc)) from None
    if backend not in BACKENDS:
        raise InputError(f"backend must be one of {', '.join(BACKENDS)}, found {backend!r}")
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:
        raise InputError(f"jobs must be 1 to {MAX_JOBS}, found {jobs}")
    if hint_cache < 1:
        raise InputError(f"hint_cache must be 1 or more, in bytes, found {hint_cache}")
