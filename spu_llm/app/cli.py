"""The command `spu-llm`."""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from spu_llm.app import config, limiting, marking, two_party_text
from spu_llm.app.defaults import (
    DRAFT_LENGTH,
    MAX_PREFIX_PAD,
    MAX_SESSIONS,
    PREFIX_PAD,
    PROMPT,
    SESSION_MINUTES,
    SESSIONS,
    shipped,
)
from spu_llm.app.output import check_json, write_json
from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.core.parallel import MAX_JOBS, own_cores


class Parser(argparse.ArgumentParser):
    """Bad options end in one line and exit code 2; options are not abbreviated. `fill` adds those
    that only a command that was chosen needs.
    """

    def __init__(self, fill: Callable[[Parser], None] | None = None, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        self._fill = fill

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        if config.OPTION in self._option_string_actions:
            command = self.prog.rpartition(" ")[2]
            args = config.with_file(command, args or [], self._actions)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += " (one that starts with a dash is written --option=VALUE)"
        raise InputError(f"{message}; see {self.prog} --help")


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit: 0 success, 2 bad input, 1 any other failure, 130 interrupted."""
    started = time.monotonic()
    signal.signal(signal.SIGTERM, _terminated)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with that stream closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # text that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # prompts, weights and keys are in memory
    try:
        options = _parser().parse_args(arguments, argparse.Namespace(started=started))
        options.run(options)
        sys.stdout.flush()
        code = 0
    except SpuLlmError as exc:
        code = _fail(str(exc), exc.exit_code, debug)
    except KeyboardInterrupt:
        code = _fail("interrupted", 130, debug)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - whoever read our output has gone
        code = 1
    except Exception as exc:
        if debug:
            raise
        code = _fail(f"{_unforeseen(exc)} (--debug shows where)", 1, debug)
    sys.exit(code)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    print(f"spu-llm: error: {_one_line(message)}", file=sys.stderr)
    return code


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _unforeseen(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _terminated(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def _parser() -> Parser:
    parser = Parser(prog="spu-llm", description="Private LLM inference between two parties.")
    parser.add_argument("--version", action="version", version=f"spu-llm {version('spu-llm')}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    demo = commands.add_parser("demo", help="both parties on this machine, shipped model pair")
    _folder(demo, "--model", "the provider's private model directory")
    _client_options(demo)
    _folder(demo, "--pool", "keep what is made ahead of time, both parties' halves")
    marking.add_provider_option(demo, "of the provider here (default: a key for this run alone); ")
    demo.set_defaults(run=_complete, server=None)

    prepare = commands.add_parser(
        "prepare", help="make material for a completion ahead of time, which it then takes",
        description="Both parties make what a completion takes: on this machine, or, with "
        "--server, with a provider that was started with --pool. Give the completion the same "
        "options, a prompt of the same length, and the same --pool.",
    )  # fmt: skip
    _folder(prepare, "--pool", "where it is kept: both halves, or with --server the client's",
            required=True)  # fmt: skip
    place = prepare.add_mutually_exclusive_group()
    place.add_argument("--server", metavar="HOST:PORT")
    _folder(place, "--model", "the provider's private model directory")
    length = prepare.add_mutually_exclusive_group()
    length.add_argument("--prompt", default=PROMPT,
                        help="for its length alone (default: that of demo)")  # fmt: skip
    length.add_argument("--prompt-tokens", type=int, metavar="N", help="the length itself")
    prepare.add_argument("--steps", type=int, metavar="K",
                         help="default: --max-new-tokens at three a step, with --standard at one")
    prepare.add_argument("--watch", action="store_true",
                         help="stay, and make more when a completion has used some, until Ctrl-C")
    prepare.add_argument("--disk", type=int, metavar="MB",
                         help="make no more than fits, if --pool is to hold so much in all")
    _request_options(prepare)
    _session_options(prepare)
    _jobs_option(prepare)
    add_identity_options(prepare)
    prepare.set_defaults(run=_prepare)

    serve = commands.add_parser("serve", help="provider: serve completions with a private model")
    _folder(serve, "--model", "private model directory", required=True)
    serve.add_argument("--listen", required=True, metavar="HOST:PORT")
    serve.add_argument("--system-prompt", type=Path, metavar="FILE",
                       help="text before every prompt, which no client gets to know")
    serve.add_argument("--prefix-pad", type=int, metavar="N",
                       help="clients see its length rounded up to a multiple of that, in tokens "
                       f"(default: {PREFIX_PAD})")
    marking.add_provider_option(serve, "nothing else is served; ")
    two_party_text.add_serve_options(serve)
    serve.add_argument("--once", action="store_true", help="end after one session")
    serve.add_argument("--sessions", type=int, default=SESSIONS, metavar="N",
                       help="at a time, each with a worker process (default: %(default)s)")
    serve.add_argument("--session-minutes", type=int, default=SESSION_MINUTES, metavar="N",
                       help="end a session after that (default: %(default)s)")
    limiting.add_options(serve)
    serve.add_argument("--studies", action="store_true",
                       help="also take part in measurements (bench, experiment)")  # fmt: skip
    _folder(serve, "--pool", "keep what is made ahead of time, for each client that does")
    serve.add_argument("--disk", type=int, metavar="MB",
                       help="keep no more than that in --pool, for all clients together")
    serve.add_argument("--sampling-seed", type=int, help=argparse.SUPPRESS)
    serve.add_argument("--exit-with-parent", action="store_true", help=argparse.SUPPRESS)
    serve.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)
    _session_options(serve)
    _jobs_option(serve)
    add_identity_options(serve)
    serve.set_defaults(run=_serve)

    generate = commands.add_parser("generate", help="client: complete a prompt")
    generate.add_argument("--server", required=True, metavar="HOST:PORT")
    _client_options(generate)
    _folder(generate, "--pool", "keep what is made ahead of time, if the provider does")
    add_identity_options(generate)
    generate.set_defaults(run=_complete, model=None)

    from spu_llm.app import (
        attacking,
        calibrating,
        doctor,
        keys,
        listing,
        private_text,
        splitting,
        vaults,
        watermarking,
    )
    from spu_llm.app.studies import add_commands

    doctor.add_command(commands)
    keys.add_command(commands)
    listing.add_command(commands)
    calibrating.add_command(commands)
    vaults.add_command(commands)
    attacking.add_command(commands)
    private_text.add_command(commands)
    splitting.add_command(commands)
    watermarking.add_command(commands)
    add_commands(commands)
    return parser


def _folder(parser: Any, option: str, words: str, *, required: bool = False) -> None:
    parser.add_argument(option, type=Path, required=required, metavar="DIR", help=words)


def _session_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", choices=("local", "lan", "wan"), default="local",
                        help="emulate a network (default: local, none)")  # fmt: skip
    parser.add_argument(config.OPTION, type=Path, metavar="FILE",
                        help="options from a TOML file, in a table named after the command")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


def _client_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT",
                        help="end before this text; may be given again")  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="S", help="fix sampling")
    marking.add_option(parser)
    _request_options(parser)
    _session_options(parser)
    _jobs_option(parser)


def _request_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--draft-length", type=int, default=DRAFT_LENGTH, metavar="G",
                        help="drafts per secure step, 1 to 16 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--standard", action="store_true", help="no drafting: one token a step")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T",
                        help="0 is greedy (default: %(default)s)")  # fmt: skip
    parser.add_argument("--verify", default="token", metavar="VARIANT",
                        help="token (default; gives away tokens alone), post and naive (as "
                        "published), race; marked, of a provider that marks texts")  # fmt: skip
    parser.add_argument("--show-progress", action="store_true",
                        help="the provider learns how many drafts stay, step by step: somewhat "
                        "cheaper (with --verify post and naive it always does)")  # fmt: skip
    parser.add_argument("--top-k", type=int, default=0, metavar="K",
                        help="draw among the K likeliest tokens (with --verify post)")  # fmt: skip
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P",
                        help="draw among the likeliest that hold mass P (likewise)")  # fmt: skip
    parser.add_argument("--public-prefix", default="", metavar="TEXT",
                        help="text before the prompt that the provider may know; it costs no "
                        "secure prefill")  # fmt: skip
    marking.add_candidates(parser)
    _folder(parser, "--draft-model", "public model directory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")


def _jobs_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, metavar="N",
                        help="cores that make material, if the other party gives as many "
                        "(default: all, or with both parties here half of them each)")  # fmt: skip


def jobs_of(options: argparse.Namespace, parties_here: int) -> int:
    """InputError unless `--jobs` is a number of cores, or not given."""
    if options.jobs is None:
        return own_cores(parties_here)
    if not 1 <= options.jobs <= MAX_JOBS:
        raise InputError(f"--jobs must be 1 to {MAX_JOBS}, found {options.jobs}")
    return int(options.jobs)


def add_identity_options(parser: argparse.ArgumentParser) -> None:
    """Who this party is, and whom it trusts."""
    _folder(parser, "--identity", "this party's certificate and key, as spu-llm keygen makes them")
    parser.add_argument("--trust", type=Path, metavar="FILE",
                        help="certificates, in PEM form, of whom is let in: the other party's, or "
                        "of authorities that sign such ones")  # fmt: skip
    parser.add_argument("--insecure", action="store_true",
                        help="plain sockets, no certificates: for one machine only")  # fmt: skip


def address(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):  # an IPv6 address
        host = host[1:-1]
    try:
        valid = bool(host.encode("idna")) and port.isascii() and port.isdigit()
        valid = valid and len(port) <= 5
    except UnicodeError:
        valid = False
    # Port 0 lets a listener take any free one.
    if not valid or not (option != "--listen") <= int(port) <= 65535:
        raise InputError(f"{option} must be HOST:PORT, found {text!r}")
    return host, int(port)


def identity_of(options: argparse.Namespace) -> Any:
    """This party's certificate and whom it trusts, or None with `--insecure`."""
    given = [option is not None for option in (options.identity, options.trust)]
    if options.insecure:
        if any(given):
            raise InputError("--insecure uses no certificates; leave --identity and --trust out")
        return None
    if not all(given):
        raise InputError(
            "give --identity DIR, which spu-llm keygen makes, and --trust FILE, the other party's "
            "certificate; or --insecure, for plain connections on a machine you trust"
        )
    from spu_llm.net import identity

    return identity.load(options.identity, options.trust)


def _provider(options: argparse.Namespace) -> Any:
    """The provider that `--server` names, or one on this machine."""
    from spu_llm.app.completing import Provider
    from spu_llm.service.client import Server

    server = None
    if options.server is not None:
        server = Server(
            *address(options.server, "--server"), options.network, identity_of(options)
        )
    jobs = jobs_of(options, 1 if server is not None else 2)
    model = options.model or shipped("private")
    return Provider(options.network, server, model, options.pool, jobs)


def _record(kind: Any, options: argparse.Namespace, **more: Any) -> Any:
    """A dataclass of options, which have the names of its fields, but for those in `more`."""
    known = vars(options) | more
    return kind(**{field.name: known[field.name] for field in dataclasses.fields(kind)})


def _settle_draft_length(options: argparse.Namespace) -> None:
    """`--standard` is a draft length of 0; InputError when such a length is asked for."""
    if options.standard:
        options.draft_length = 0
    elif options.draft_length < 1:
        raise InputError(
            f"--draft-length must be 1 to 16, found {options.draft_length}; "
            "--standard turns drafting off"
        )


def _complete(options: argparse.Namespace) -> None:
    """Stream the text to stdout, progress and the summary to stderr, the result to `--json`."""
    from spu_llm.app.completing import GenerateOptions, encoded, generate
    from spu_llm.app.screen import Screen
    from spu_llm.systems.decoding.records import ClientInputs
    from spu_llm.systems.decoding.request import Request

    provider = _provider(options)
    _settle_draft_length(options)
    check_json(options.json)
    directory = options.draft_model or shipped("public")
    with (
        marking.opened(options, directory) as marked,
        marking.provider_key(options, provider.model) as mark,
        closing(Screen(options.prompt)) as screen,
    ):
        prefix, prompt = encoded(options.public_prefix, options.prompt, directory)
        own_seed = options.seed if provider.server is None else None
        asked = GenerateOptions(
            request=_record(
                Request, options, prompt_tokens=len(prompt), public_prefix=tuple(prefix)
            ),
            inputs=ClientInputs(
                prompt, str(directory), options.stop, options.seed, own_seed,
                None if marked is None else marked.mark,
            ),
            provider=dataclasses.replace(provider, mark=mark),
            started=options.started,
            marking=marked,
        )
        result = generate(asked, screen.on_event, screen.say)
        screen.finish()
    screen.summary(result)
    write_json(options.json, result)


def _text_of(path: Path | None, option: str) -> str:
    """All of a file; InputError when it holds no text."""
    if path is None:
        return ""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise InputError(f"cannot read {path}, of {option}: {reason}") from None
    if not text:
        raise InputError(f"{path}, of {option}, is empty")
    return text


def megabytes(options: argparse.Namespace, name: str) -> int | None:
    """An option in bytes; InputError unless it is a size, or not given."""
    found = getattr(options, name)
    if found is not None and found < 1:
        raise InputError(f"--{name.replace('_', '-')} must be 1 or more, in MB, found {found}")
    return None if found is None else found * 10**6


def _serve(options: argparse.Namespace) -> None:
    from spu_llm.service.provider import ServeOptions

    if options.sampling_seed is not None and not options.once:
        raise InputError("--sampling-seed fixes the randomness of one session; add --once")
    for name in ("disk", "client_disk"):
        if getattr(options, name) is not None and options.pool is None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} bounds what is kept in --pool; give both")
    check_serving(options)
    pad = PREFIX_PAD if options.prefix_pad is None else options.prefix_pad
    if not 1 <= pad <= MAX_PREFIX_PAD:
        raise InputError(f"--prefix-pad must be 1 to {MAX_PREFIX_PAD}, found {pad}")
    if options.prefix_pad is not None and options.system_prompt is None:
        raise InputError("--prefix-pad is of a --system-prompt; give both")
    more = {
        "prefix_pad": pad,
        "spendable": two_party_text.spendable(options),
        "system_prompt": _text_of(options.system_prompt, "--system-prompt"),
        "disk_bytes": megabytes(options, "disk"),
        "jobs": jobs_of(options, 1),
        "identity": identity_of(options),
        "split": None,
        **limiting.of(options),
    }
    host, port = address(options.listen, "--listen")

    run_provider(
        _record(ServeOptions, options, host=host, port=port, **more), "serving", options.report_fd
    )


def check_serving(options: argparse.Namespace) -> None:
    """InputError unless sessions may be so many and so long."""
    if options.session_minutes < 1:
        raise InputError(f"--session-minutes must be 1 or more, found {options.session_minutes}")
    if not 1 <= options.sessions <= MAX_SESSIONS:
        raise InputError(f"--sessions must be 1 to {MAX_SESSIONS}, found {options.sessions}")


def run_provider(options: Any, what: str, report_fd: int | None = None) -> None:
    """Serve with these `ServeOptions`, and say where: `what` is done there."""
    from spu_llm.service.launching import write_report
    from spu_llm.service.provider import serve

    def on_port(port: int) -> None:
        print(f"{what} {options.model} on {options.host}:{port}", flush=True)
        write_report(report_fd, port=port)

    try:
        serve(
            options,
            say=lambda line: print(f"spu-llm: {line}", file=sys.stderr, flush=True),
            on_port=on_port,
        )
    except SpuLlmError as exc:
        write_report(report_fd, error=_one_line(str(exc)), exit_code=exc.exit_code)
        raise
    except Exception as exc:
        write_report(report_fd, error=_one_line(_unforeseen(exc)), exit_code=1)
        raise


def _prepare(options: argparse.Namespace) -> None:
    """Progress to stderr, what was made to stdout, the result to `--json`."""
    from spu_llm.app import keeping
    from spu_llm.app.completing import encoded, prepare
    from spu_llm.app.material import material_table
    from spu_llm.app.screen import Stages
    from spu_llm.service.supervisor import Look
    from spu_llm.systems.decoding.records import PrepareRequest

    provider = _provider(options)
    check_json(options.json)
    disk_bytes = megabytes(options, "disk")
    directory = options.draft_model or shipped("public")
    _settle_draft_length(options)
    new, tokens = options.max_new_tokens, options.prompt_tokens
    prefix, prompt = encoded(options.public_prefix, options.prompt, directory)
    if tokens is None:
        tokens = len(prompt)
    likely = -(-(new - 1) // 3) if options.draft_length else new - 1
    steps = likely if options.steps is None else options.steps
    request = _record(
        PrepareRequest, options, prompt_tokens=tokens, public_prefix=tuple(prefix), steps=steps,
        room_bytes=None,
    )  # fmt: skip

    def make(look: Look) -> dict[str, Any]:
        # Who watches for days wants a line for what happens, not for how far it is.
        with closing(Stages(lines=not options.watch)) as screen:
            result = prepare(request, directory, provider, screen.on_event, disk_bytes, look)
        write_json(options.json, result)
        return result

    with marking.provider_key(options, provider.model) as mark:
        provider = dataclasses.replace(provider, mark=mark)
        if options.watch:
            assert provider.client_pool is not None
            keeping.watch(
                provider.client_pool, make, lambda line: print(_timed(line), flush=True)
            )
        else:
            print(material_table(make(lambda: None)), flush=True)


def _timed(line: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {_one_line(line)}"
