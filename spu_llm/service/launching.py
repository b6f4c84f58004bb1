"""Both parties on one machine: a provider process of one's own, and what it reports.

It reports on a pipe that it inherits (`serve --report-fd`), as JSON lines: where it listens, and
what ended it. What it prints is for people.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from spu_llm.core import blas
from spu_llm.core.errors import InputError, PeerError, SpuLlmError
from spu_llm.core.settings import OWN
from spu_llm.net.shaping import NETWORKS, shape_of
from spu_llm.service.client import Server
from spu_llm.service.supervisor import python_command

PROVIDER_EXIT_S = 2.0


@contextmanager
def local_provider(
    model: Path,
    network: str,
    *,
    studies: bool = False,
    sampling_seed: int | None = None,
    pool: Path | None = None,
    jobs: int = 1,
    credentials: tuple[Path, Path] | None = None,
    mark: Path | None = None,
    ranges: Path | None = None,
    backend: str = OWN,
) -> Iterator[Server]:
    """Start a provider process on this machine that serves one session (`own_provider`); yield
    where it listens. `credentials`: its identity and whom it trusts; None: in the clear. `mark`: a
    key that it marks under. `ranges`: of activations, where they do not lie beside the model.
    `backend`: what computes forwards.
    """
    command = [*python_command("spu_llm.app.cli"), "serve", f"--model={model}"]
    command += ["--listen", "127.0.0.1:0", *network_options(network), "--backend", backend]
    command += ["--once", "--exit-with-parent"]
    if credentials is None:
        command += ["--insecure"]
    else:
        command += [f"--identity={credentials[0]}", f"--trust={credentials[1]}"]
    command += ["--studies"] if studies else []
    command += [f"--sampling-seed={sampling_seed}"] if sampling_seed is not None else []
    command += [f"--pool={pool}"] if pool is not None else []
    command += [f"--mark={mark}"] if mark is not None else []
    command += [f"--ranges={ranges}"] if ranges is not None else []
    command += [f"--jobs={jobs}"]
    with own_provider(command, network) as server:
        yield replace(server, backend=backend)


def network_options(name: str) -> list[str]:
    """Return the command line's options for the network of this name."""
    if name in NETWORKS:
        return ["--network", name]
    shape = shape_of(name)
    assert shape.bits_per_s is not None
    mbps, delay = round(shape.bits_per_s / 1e6), round(1000 * shape.delay_s)
    return [f"--bandwidth={mbps}", f"--delay={delay}"]


@contextmanager
def own_provider(command: Sequence[str], network: str) -> Iterator[Server]:
    """Start a provider process that ends with this one, by a command that takes `--report-fd`;
    yield where it listens.

    When the session fails because of the provider, the error says what the provider reported.
    """
    readable, writable = os.pipe()
    with open(readable, encoding="utf-8") as reports:
        try:
            provider = subprocess.Popen(
                [*command, f"--report-fd={writable}"],
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[writable],
                env=os.environ | blas.settings(),
                start_new_session=True,
            )
        finally:
            os.close(writable)
        try:
            yield Server("127.0.0.1", _listening_port(reports), network)
        except PeerError as exc:
            raise _failure(provider, reports, exc) from exc
        finally:
            end(provider)


def end(process: subprocess.Popen[Any], within_s: float = PROVIDER_EXIT_S) -> None:
    """Ask a process to end, make it if it does not, and close its pipes."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):  # of what it no longer reads
                pipe.close()


def _listening_port(reports: IO[str]) -> int:
    report = _next(reports)
    if "port" not in report:
        raise _error(report, PeerError("the provider did not start"))
    return int(report["port"])


def _failure(provider: subprocess.Popen[bytes], reports: IO[str], seen: PeerError) -> SpuLlmError:
    """Return why a session failed in which the client saw `seen`."""
    try:
        code = provider.wait(PROVIDER_EXIT_S)
    except subprocess.TimeoutExpired:
        return seen
    if code < 0:
        return PeerError(f"the provider process was killed by signal {-code}")
    return _error(_next(reports), seen)


def _error(report: dict[str, Any], seen: PeerError) -> SpuLlmError:
    """Return what the client saw, or what the provider reports of it when it could."""
    words = report.get("error", "")
    if words in str(seen):
        return seen
    if report["exit_code"] == InputError.exit_code:
        return InputError(words)
    return PeerError(f"{seen}; the provider said: {words}")


def _next(reports: IO[str]) -> dict[str, Any]:
    """Return the next report; nothing when the provider has ended without one."""
    line = reports.readline()
    if not line.endswith("\n"):
        return {}
    report: dict[str, Any] = json.loads(line)
    return report


def write_report(descriptor: int | None, **fields: Any) -> None:
    """Write to the provider's end of the pipe: a `port`, or an `error` and its `exit_code`.

    Without one nobody listens. PeerError when whoever did has gone.
    """
    if descriptor is not None:
        try:
            os.write(descriptor, json.dumps(fields).encode() + b"\n")
        except OSError as exc:
            raise PeerError("the process that started this provider has gone") from exc
