"""Options that several commands have, and what they say."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from spu_llm.api.defaults import shipped
from spu_llm.app import config
from spu_llm.core.errors import InputError
from spu_llm.core.parallel import MAX_JOBS, own_cores
from spu_llm.core.settings import BACKENDS, OWN
from spu_llm.core.text_files import decoded, read_text
from spu_llm.net.address import host_and_port
from spu_llm.offline.defaults import HINT_CACHE_BYTES
from spu_llm.service.model_names import check_name

if TYPE_CHECKING:
    from spu_llm.api.provider import Provider
    from spu_llm.service.client import Server

T = TypeVar("T")


def add_folder(parser: Any, option: str, words: str, *, required: bool = False) -> None:
    """Add an option that names a directory."""
    parser.add_argument(option, type=Path, required=required, metavar="DIR", help=words)


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that runs between two parties."""
    add_network(parser)
    parser.add_argument(
        config.OPTION,
        type=Path,
        metavar="FILE",
        help="options from a TOML file, in a table named after the command",
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


class _Named(argparse.Action):
    """Takes a network's name, in place of what was given before."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.network, namespace.bandwidth, namespace.delay = values, None, None


class _Measured(argparse.Action):
    """Takes a figure of a network that has no name, in place of a named one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.network = "local"
        setattr(namespace, self.dest, values)


def add_network(parser: argparse.ArgumentParser, words: str = "") -> None:
    """Add what names a network to emulate; `network_of` reads it. `words`: before the help."""
    parser.add_argument(
        "--network",
        action=_Named,
        choices=("local", "lan", "wan"),
        default="local",
        help=f"{words}emulate a network (default: local, none)",
    )
    parser.add_argument(
        "--bandwidth",
        action=_Measured,
        type=int,
        metavar="MBPS",
        help=f"{words}of a network to emulate in place of --network; give --delay too, and the "
        "same at both parties",
    )
    parser.add_argument(
        "--delay",
        action=_Measured,
        type=int,
        metavar="MS",
        help=f"{words}one way, of the network of --bandwidth",
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add what computes a model's forwards, which both parties choose."""
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default=OWN,
        help="what computes the model: the protocols of this framework (own, the default), or "
        "segments that SPU compiles (spu); the same at both parties",
    )


def add_prompt(
    parser: Any, default: str | None, words: str = "", *, of_length: bool = False
) -> Any:
    """Add a prompt to a command: as a word, from a file, or from standard input. Return the group
    of options of which one is given; `of_length`: `--prompt-tokens`, its length alone, is another.
    """
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--prompt",
        type=_prompt,
        default=default,
        metavar="TEXT",
        help=f"{words}- reads it from standard input, where no other user of this machine sees it "
        "(a text here shows in the list of processes)",
    )
    group.add_argument(
        "--prompt-file",
        dest="prompt",
        type=_prompt_of_file,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="read it from a file; one line end after the last line is not its own",
    )
    if of_length:
        group.add_argument("--prompt-tokens", type=int, metavar="N", help="the length itself")
    return group


def _prompt(given: str) -> str:
    """Return the text of `--prompt`, of standard input for a dash."""
    if given != "-":
        return given
    if sys.stdin is None:
        raise InputError("there is no standard input to read the prompt from; use --prompt-file")
    try:
        return _without_last_end(decoded(sys.stdin.buffer.read(), "standard input"))
    except OSError as exc:
        raise InputError(f"cannot read the prompt from standard input: {exc.strerror}") from None


def _prompt_of_file(name: str) -> str:
    return _without_last_end(read_text(Path(name)))


def _without_last_end(text: str) -> str:
    """Return `text` without the line end that editors and `echo` put after the last line."""
    return text.removesuffix("\n")


def add_ranges(parser: argparse.ArgumentParser) -> None:
    """Add where a private model's ranges are, of a command that serves or checks it."""
    parser.add_argument(
        "--ranges",
        type=Path,
        metavar="FILE",
        help="its ranges, as calibrate --out writes them (default: ranges.json in "
        "the model's directory)",
    )


def add_system(parser: argparse.ArgumentParser, words: str = "") -> None:
    """Add what a chat's model is told first."""
    parser.add_argument(
        "--system",
        metavar="TEXT",
        help=f"{words}what the model is told before your first turn, in place of "
        "its own; secret, but ps shows it unless it is in the file of --config",
    )


def add_stop(parser: argparse.ArgumentParser) -> None:
    """Add `--stop`, which `models.stops` reads."""
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text, or before the special token of this name, say "
        "'<|im_end|>'; may be given again",
    )


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add `--jobs`, which `jobs_of` reads."""
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="cores that make correlated randomness, if the other party gives as many "
        "(default: all, or with both parties here half of them each)",
    )


def jobs_of(options: argparse.Namespace, parties_here: int) -> int:
    """Return how many cores make correlated randomness. InputError where `--jobs` is no number of
    cores.
    """
    if options.jobs is None:
        return own_cores(parties_here)
    if not 1 <= options.jobs <= MAX_JOBS:
        raise InputError(f"--jobs must be 1 to {MAX_JOBS}, found {options.jobs}")
    return int(options.jobs)


def add_ray(parser: Any, words: str) -> None:
    """Add where this party's own Ray cluster is; `words`: what it is for."""
    parser.add_argument(
        "--ray", metavar="HOST:PORT", help=f"the head of this party's own Ray cluster, {words}"
    )


def add_pairs(parser: Any) -> None:
    """Add how many producers there are on a cluster, beside `--ray`; `check_pairs` looks at it."""
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help="with --ray: producers on it, each with one of the provider's sessions "
        "(default: one a core)",
    )
    parser.add_argument(
        "--door",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="with --ray: one more port of the provider for producers (serve --node-port), on "
        "another of its machines; may be given again",
    )


def check_pairs(options: argparse.Namespace) -> None:
    """Raise InputError where `--pairs` or `--door` say how many producers there are, or where they
    connect to, and `--ray` not where they run, and where a door is no HOST:PORT.
    """
    if options.ray is None and options.door:
        raise InputError("--door is of producers on a cluster; give --ray HOST:PORT, too")
    doors_of(options)
    if options.pairs is not None and options.ray is None:
        raise InputError("--pairs are of producers on a cluster; give --ray HOST:PORT, too")
    if options.pairs is not None and options.pairs < 1:
        raise InputError(f"--pairs must be 1 or more, found {options.pairs}")


def doors_of(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return host and port of each `--door`; InputError where one is none."""
    return [address(door, "--door") for door in options.door]


def add_hint_cache(parser: Any, words: str = "") -> None:
    """Add what a client keeps of hints; `hint_cache_of` reads it."""
    parser.add_argument(
        "--hint-cache",
        type=int,
        metavar="MB",
        help=f"{words}keep no more than that of all providers' hints; those used "
        "longest ago go first, and a model whose hints are more is refused "
        f"(default: {HINT_CACHE_BYTES // 10**6})",
    )


def hint_cache_of(options: argparse.Namespace) -> int:
    """Return `--hint-cache` in bytes; InputError unless it is a size, or not given."""
    size = megabytes(options, "hint_cache")
    return HINT_CACHE_BYTES if size is None else size


def add_identity_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say who this party is, and whom it trusts."""
    add_folder(
        parser, "--identity", "this party's certificate and key, as spu-llm keygen makes them"
    )
    parser.add_argument(
        "--trust",
        type=Path,
        metavar="FILE",
        help="certificates, in PEM form, of whom is let in: the other party's, or "
        "of authorities that sign such ones",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="plain sockets, no certificates: for one machine only",
    )


def address(text: str, option: str) -> tuple[str, int]:
    """Return host and port that an option names; InputError when it names none."""
    return host_and_port(text, option, listens=option == "--listen")


def identity_of(options: argparse.Namespace) -> Any:
    """Return this party's certificate and whom it trusts, or None with `--insecure`."""
    from spu_llm.net.identity import identity_in

    return identity_in(options.identity, options.trust, insecure=options.insecure)


def network_of(options: argparse.Namespace) -> str:
    """Return the network to emulate, by its name; InputError for half of one."""
    mbps, delay = options.bandwidth, options.delay
    if mbps is None and delay is None:
        name: str = options.network
        return name
    if mbps is None or delay is None:
        raise InputError("--bandwidth and --delay are given together")
    from spu_llm.net.shaping import name_of

    try:
        return name_of(mbps, delay)
    except ValueError as exc:
        raise InputError(str(exc)) from None


def add_served_model(parser: Any) -> None:
    """Add which model of a provider is asked for, beside `--server`; `server_of` reads it."""
    parser.add_argument(
        "--served-model",
        metavar="NAME",
        help="with --server: the provider's model of this name (doctor --server lists "
        "them; default: its first)",
    )


def server_of(options: argparse.Namespace) -> Server:
    """Return where the provider that `--server` names is reached, and as whom."""
    from spu_llm.service.client import Server

    host, port = address(options.server, "--server")
    backend = getattr(options, "backend", OWN)  # which not all commands have
    name = _served_model(options)
    return Server(host, port, network_of(options), identity_of(options), backend, name)


def _served_model(options: argparse.Namespace) -> str:
    """Return `--served-model`, which not all commands have; empty: none was given."""
    name = getattr(options, "served_model", None)
    if name is not None:
        check_name(name, "--served-model")
    return name or ""


def check_served_model(options: argparse.Namespace) -> None:
    """Raise InputError where `--served-model` names a model, but `--server` no provider."""
    if options.server is None and _served_model(options):
        raise InputError(
            "--served-model is of a provider elsewhere; give --server, or leave it out"
        )


def provider_of(options: argparse.Namespace) -> Provider:
    """Return the provider that `--server` names, or one on this machine."""
    from spu_llm.api.provider import Provider

    server = None if options.server is None else server_of(options)
    jobs = jobs_of(options, 1 if server is not None else 2)
    model = options.model or shipped("private")
    check_served_model(options)
    if server is not None and options.ranges is not None:
        raise InputError("--ranges are of a model on this machine; leave --server out")
    return Provider(
        network_of(options),
        server,
        model,
        options.pool,
        jobs,
        hint_cache_of(options),
        ranges=options.ranges,
        backend=getattr(options, "backend", OWN),
    )


def record(kind: Any, options: argparse.Namespace, **more: Any) -> Any:
    """Return a dataclass of options, which have its fields' names, but for those in `more`."""
    known = vars(options) | more
    return kind(**{field.name: known[field.name] for field in dataclasses.fields(kind)})


def given(kind: type[T], options: argparse.Namespace) -> T:
    """Return a dataclass of options; fields that a command lacks are as by default."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(options).items() if name in names})


def megabytes(options: argparse.Namespace, name: str) -> int | None:
    """Return an option in bytes; InputError unless it is a size, or not given."""
    size = getattr(options, name)
    if size is not None and size < 1:
        raise InputError(f"--{name.replace('_', '-')} must be 1 or more, in MB, found {size}")
    return None if size is None else size * 10**6
