"""The command `serve`: a provider of completions; and how every provider is run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.api.defaults import MAX_PREFIX_PAD, MAX_SESSIONS, PREFIX_PAD, SESSION_MINUTES, SESSIONS
from spu_llm.app import journaling, limiting, marking, named_models, reloading, two_party_text
from spu_llm.app.named_models import NamedModel
from spu_llm.app.options import (
    add_backend,
    add_folder,
    add_identity_options,
    add_jobs,
    add_ranges,
    add_ray,
    add_session_options,
    address,
    identity_of,
    jobs_of,
    megabytes,
    network_of,
    record,
)
from spu_llm.app.output import unforeseen
from spu_llm.app.printing import show
from spu_llm.core.errors import InputError, SpuLlmError, WantedError
from spu_llm.core.printable import one_line
from spu_llm.core.settings import OWN
from spu_llm.core.text_files import read_text

if TYPE_CHECKING:
    from spu_llm.net.manifest import Scalar
    from spu_llm.service.journal import Log
    from spu_llm.service.provider import ServeOptions
    from spu_llm.systems.served import ServedSystem


def add_command(commands: Any) -> None:
    serve = commands.add_parser("serve", help="provider: serve completions with a private model")
    named_models.add_option(serve)
    add_ranges(serve)
    serve.add_argument("--listen", required=True, metavar="HOST:PORT")
    serve.add_argument(
        "--system-prompt",
        type=Path,
        metavar="FILE",
        help="text before every prompt, which no client gets to know",
    )
    serve.add_argument(
        "--prefix-pad",
        type=int,
        metavar="N",
        help="clients see its length rounded up to a multiple of that, in tokens "
        f"(default: {PREFIX_PAD})",
    )
    marking.add_provider_option(serve, "nothing else is served; ")
    two_party_text.add_serve_options(serve)
    add_sessions(serve)
    add_ray(serve, "on whose machines sessions run; each has the model in the same directory")
    serve.add_argument(
        "--node-port",
        type=int,
        metavar="PORT",
        help="with --ray and --pool: each other machine of the cluster listens on it for clients' "
        "producers, too (prepare or gateway, --door), with the files of --identity and --trust at "
        "the same paths; 0: any that is free",
    )
    serve.add_argument(
        "--studies", action="store_true", help="also take part in measurements (bench, experiment)"
    )
    add_folder(serve, "--pool", "keep what is made ahead of time, for each client that does")
    serve.add_argument(
        "--disk",
        type=int,
        metavar="MB",
        help="keep no more than that in --pool, for all clients together",
    )
    serve.add_argument("--sampling-seed", type=int, help=argparse.SUPPRESS)
    serve.add_argument("--exit-with-parent", action="store_true", help=argparse.SUPPRESS)
    serve.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)
    add_backend(serve)
    add_session_options(serve)
    add_jobs(serve)
    add_identity_options(serve)
    serve.set_defaults(run=_serve)


def add_sessions(serve: argparse.ArgumentParser) -> None:
    """Add how many sessions there are, how long, what one client may take of them, and what is
    written down.
    """
    serve.add_argument("--once", action="store_true", help="end after one session")
    serve.add_argument(
        "--sessions",
        type=int,
        default=SESSIONS,
        metavar="N",
        help="at a time, each with a worker process (default: %(default)s)",
    )
    serve.add_argument(
        "--session-minutes",
        type=int,
        default=SESSION_MINUTES,
        metavar="N",
        help="end a session after that (default: %(default)s)",
    )
    limiting.add_options(serve)
    journaling.add_options(serve)


def _serve(options: argparse.Namespace) -> None:
    run_provider(options, _made, "serving")


def _made(options: argparse.Namespace) -> ServeOptions:
    from spu_llm.service.provider import ServeOptions

    if options.sampling_seed is not None and not options.once:
        raise InputError("--sampling-seed fixes the randomness of one session; add --once")
    for name in ("disk", "client_disk"):
        if getattr(options, name) is not None and options.pool is None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} bounds what is kept in --pool; give both")
    if options.node_port is not None:
        if options.ray is None or options.pool is None:
            raise InputError("--node-port is of producers' sessions; give --ray and --pool, too")
        if not 0 <= options.node_port <= 65535:
            raise InputError(f"--node-port must be 0 to 65535, found {options.node_port}")
    check_serving(options)
    models = named_models.by_name(options.model)
    if len(models) > 1:
        _check_shared(options)
    if options.backend != OWN and options.references is not None:
        raise InputError(
            f"--backend {options.backend} is of completions and chats; leave --references out"
        )
    pad = PREFIX_PAD if options.prefix_pad is None else options.prefix_pad
    if not 1 <= pad <= MAX_PREFIX_PAD:
        raise InputError(f"--prefix-pad must be 1 to {MAX_PREFIX_PAD}, found {pad}")
    if options.prefix_pad is not None and options.system_prompt is None:
        raise InputError("--prefix-pad is of a --system-prompt; give both")
    more = {
        "models": models,
        "prefix_pad": pad,
        "system": _system(options),
        "system_prompt": _text_of(options.system_prompt, "--system-prompt"),
        "disk_bytes": megabytes(options, "disk"),
        "network": network_of(options),
        "jobs": jobs_of(options, 1),
        "identity": identity_of(options),
        "quotas": limiting.of(options),
    }
    host, port = address(options.listen, "--listen")
    made: ServeOptions = record(ServeOptions, options, host=host, port=port, **more)
    return made


# Options that belong to one model.
_OF_ONE = ("ranges", "system_prompt", "mark", "references", "studies")


def _check_shared(options: argparse.Namespace) -> None:
    """Raise InputError for an option that does not go with several models."""
    for name in _OF_ONE:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} is of one model; give one --model, or leave {option} out")


def _system(options: argparse.Namespace) -> ServedSystem:
    """Return what is served: the whole model, and what one of the systems adds."""
    from spu_llm.systems.served import ServedSystem
    from spu_llm.systems.watermark.served import MarkedTexts

    references = two_party_text.own_references(options)
    if options.mark is None:
        return ServedSystem() if references is None else references
    if references is not None:
        raise InputError("with --mark every text is a marked completion; leave --references out")
    return MarkedTexts(options.mark)


def _text_of(path: Path | None, option: str) -> str:
    """Return the text in a file, "" if no file is given; InputError when it holds none."""
    if path is None:
        return ""
    text = read_text(path, option)
    if not text:
        raise InputError(f"{path}, of {option}, is empty")
    return text


def check_serving(options: argparse.Namespace) -> None:
    """Raise InputError unless sessions may be so many and so long."""
    if options.session_minutes < 1:
        raise InputError(f"--session-minutes must be 1 or more, found {options.session_minutes}")
    if not 1 <= options.sessions <= MAX_SESSIONS:
        raise InputError(f"--sessions must be 1 to {MAX_SESSIONS}, found {options.sessions}")


@contextmanager
def _workers(options: argparse.Namespace, served: ServeOptions, log: Log) -> Iterator[Any]:
    """Yield where sessions have their workers; None: here."""
    if getattr(options, "ray", None) is None:
        yield None
        return
    from spu_llm.cluster.sessions import cluster_workers

    with cluster_workers(options.ray, served, log, options.node_port) as workers:
        yield workers


def _told(log: Log, event: str) -> Callable[[str], None]:
    """Return what logs words of an event that nothing depends on, also beside a full audit file."""
    from spu_llm.service.journal import Record

    def tell(words: str) -> None:
        with suppress(WantedError):
            log(Record(event, words))

    return tell


def run_provider(
    options: argparse.Namespace, make: Callable[[argparse.Namespace], ServeOptions], what: str
) -> None:
    """Serve with what `make` makes of the options, now and when they are read again, and say where:
    `what` is done there.
    """
    from spu_llm.service import journal
    from spu_llm.service.journal import Record
    from spu_llm.service.launching import write_report
    from spu_llm.service.provider import serve

    log = journaling.opened(options)
    served, renewal = reloading.loaded(
        options, make, lambda made: {"trust": made.identity}, _told(log, journal.RELOADED)
    )
    report_fd = options.report_fd

    def on_port(port: int) -> None:
        models = ", ".join(str(NamedModel(*one)) for one in served.models.items())
        where: dict[str, Scalar] = {"host": served.host, "port": port}
        log(Record(journal.LISTENING, fields=where | {"models": models}))
        show(f"{what} {models} on {served.host}:{port}")
        write_report(report_fd, port=port)

    try:
        with _workers(options, served, log) as workers:
            serve(served, log, on_port, renewal=renewal, workers=workers)
    except SpuLlmError as exc:
        write_report(report_fd, error=one_line(str(exc)), exit_code=exc.exit_code)
        raise
    except Exception as exc:
        write_report(report_fd, error=one_line(unforeseen(exc)), exit_code=1)
        raise
