"""`spu-llm vault`: confidential prompting as published, with a vault that is trusted."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.api.defaults import PROMPT, shipped
from spu_llm.app import obfuscating, reloading
from spu_llm.app.options import add_prompt, address
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import Generated, say, show, tell
from spu_llm.core.errors import InputError
from spu_llm.core.units import mb

if TYPE_CHECKING:
    from spu_llm.vault.told import Place

LANES = 64

_ABOUT = (
    "Vault mode (Gim, Li, Zhong: Confidential Prompting). A vault is a process that the user "
    "trusts with the prompt: it keeps the prompt's keys and values while the model's owner "
    "generates. It belongs into a confidential virtual machine, and that, with its attestation, is "
    "the operator's part: nothing here checks it. The owner trusts the vault with the weights, "
    "which pass through it at every prefill. NOT protected from the owner's engine: all generated "
    "text; and by its answers, the prompt itself ('spu-llm attack' finds it). For a prompt that "
    "nobody else may learn use 'spu-llm generate'."
)


def add_command(commands: Any) -> None:
    vault = commands.add_parser(
        "vault", help="confidential prompting as published: engine, vault, user", description=_ABOUT
    )
    roles = vault.add_subparsers(dest="role", required=True, parser_class=type(vault))

    serve = roles.add_parser("serve", help="the model owner's engine", description=_ABOUT)
    serve.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="private model directory"
    )
    serve.add_argument("--listen", required=True, metavar="HOST:PORT")
    serve.add_argument(
        "--lanes",
        type=int,
        default=LANES,
        metavar="N",
        help="texts at a time, of all vaults (default: %(default)s); of those with "
        "one certificate half as many",
    )
    _identity(serve, "--trust", "vaults")
    _common(serve)
    serve.set_defaults(run=_serve)

    keep = roles.add_parser("open", help="a user's vault", description=_ABOUT)
    keep.add_argument("--server", required=True, metavar="HOST:PORT", help="the engine")
    keep.add_argument("--listen", required=True, metavar="HOST:PORT", help="for the user")
    _identity(keep, "--trust", "the engine")
    keep.add_argument(
        "--trust-user", type=Path, metavar="FILE", help="certificates, in PEM form, of the user"
    )
    _common(keep)
    keep.set_defaults(run=_open)

    generate = roles.add_parser("generate", help="the user", description=_ABOUT)
    generate.add_argument("--vault", required=True, metavar="HOST:PORT")
    add_prompt(generate, PROMPT)
    generate.add_argument("--max-new-tokens", type=int, default=32, metavar="N")
    generate.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    generate.add_argument("--seed", type=int, metavar="S", help="fix sampling")
    generate.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="directory with the model's tokenizer (default: the shipped one)",
    )
    generate.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    obfuscating.add_options(generate)
    _identity(generate, "--trust", "the vault")
    _common(generate)
    generate.set_defaults(run=_generate)


def _identity(parser: Any, option: str, whom: str) -> None:
    parser.add_argument(
        "--identity",
        type=Path,
        metavar="DIR",
        help="this process's certificate and key, as spu-llm keygen makes them",
    )
    parser.add_argument(
        option, type=Path, metavar="FILE", help=f"certificates, in PEM form, of {whom}"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="plain sockets, no certificates: for one machine only",
    )


def _common(parser: Any) -> None:
    parser.add_argument("--exit-with-parent", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


def _place(options: argparse.Namespace, text: str, option: str, trust: Path | None) -> Place:
    from spu_llm.net import identity
    from spu_llm.vault.told import Place

    host, port = address(text, option)
    given = [options.identity is not None, trust is not None]
    if options.insecure:
        if any(given):
            raise InputError("--insecure uses no certificates; leave --identity and --trust out")
        return Place(host, port, None)
    if not all(given):
        raise InputError(
            "give --identity DIR, which spu-llm keygen makes, and the certificates of whom to "
            "trust (--trust, a vault also --trust-user); or --insecure, for plain connections on "
            "a machine you trust"
        )
    assert trust is not None
    return Place(host, port, identity.load(options.identity, trust))


def _listening(what: str, host: str) -> Callable[[int], None]:
    return lambda port: show(f"{what} on {host}:{port}")


def _serve(options: argparse.Namespace) -> None:
    from spu_llm.vault.engine import EngineOptions, serve
    from spu_llm.vault.told import MAX_LANES

    def make(found: argparse.Namespace) -> EngineOptions:
        if not 1 <= found.lanes <= MAX_LANES:
            raise InputError(f"--lanes must be 1 to {MAX_LANES}, found {found.lanes}")
        place = _place(found, found.listen, "--listen", found.trust)
        return EngineOptions(
            found.model, place.host, place.port, found.lanes, place.identity, found.exit_with_parent
        )

    served, renewal = reloading.loaded(options, make, lambda made: {"trust": made.identity})
    serve(served, say, _listening(f"engine of {served.model}", served.host), renewal=renewal)


def _open(options: argparse.Namespace) -> None:
    from spu_llm.vault.keeper import VaultOptions, keep

    def make(found: argparse.Namespace) -> VaultOptions:
        engine = _place(found, found.server, "--server", found.trust)
        user = _place(found, found.listen, "--listen", found.trust_user)
        return VaultOptions(engine, user, found.exit_with_parent)

    opened, renewal = reloading.loaded(
        options,
        make,
        lambda made: {"trust": made.engine.identity, "trust-user": made.listen.identity},
    )
    keep(opened, say, _listening("vault", opened.listen.host), renewal)


def _generate(options: argparse.Namespace) -> None:
    """Stream the text to stdout, progress to stderr, the result to `--json`."""
    from models.tokenizer import StreamDecoder, Tokenizer
    from spu_llm.app.progress import Progress
    from spu_llm.app.screen import learned_lines
    from spu_llm.systems.confidential.learned import learned
    from spu_llm.vault.told import Model
    from spu_llm.vault.user import Wish, generate

    check_output(options.json)
    place = _place(options, options.vault, "--vault", options.trust)
    tokenizer = Tokenizer.load(options.tokenizer or shipped("public"))
    progress = Progress()
    try:
        progress.stage("reading the prompt")
        prompt = obfuscating.marked_prompt(options, tokenizer)
        if prompt.targets:
            progress.stage("finding fakes")
        out = obfuscating.outgoing(options, prompt, tokenizer)
    except BaseException:
        progress.close()
        raise
    met: list[Model] = []

    def wish(model: Model) -> Wish:
        if model.tokenizer != tokenizer.digest:
            raise InputError("the model has another tokenizer; give its directory as --tokenizer")
        met.append(model)
        return Wish(
            out.rows,
            out.public,
            options.max_new_tokens,
            options.temperature,
            options.seed,
            out.compact,
            out.own,
        )

    decoder = StreamDecoder(tokenizer)
    text: list[str] = []
    generated = Generated()

    def show(part: str) -> None:
        if part:
            progress.pause()
            text.append(part)
            generated.write(part)

    def on_tokens(lanes: Any, tokens: Any) -> None:
        own = [t for lane, t in zip(lanes, tokens, strict=True) if lane == out.own]
        show(decoder.push(t for t in own if t not in tokenizer.eos_ids))

    started = time.monotonic()
    try:
        progress.stage("reaching the vault")
        answered = generate(place, wish, progress.stage, on_tokens)
        show(decoder.finish())
    finally:
        progress.close()
        generated.end_line()
    shape, tokens = met[0].shape, answered.tokens[out.own]
    facts = learned(shape, [len(row) for row in out.rows], answered.tokens)
    facts["engine"] += out.learned()
    seconds, sent = answered.seconds, answered.bytes
    figures = (
        f"{len(tokens)} tokens in {time.monotonic() - started:.1f} s: prefill "
        f"{seconds['prefill']:.1f} s, {mb(sum(sent['prefill'].values()))} of weights; decoding "
        f"{seconds['decode']:.1f} s, {mb(sum(sent['decode'].values()))} between vault and engine"
    )
    tell(*learned_lines(facts), figures)
    result = {
        "text": "".join(text),
        "token_ids": tokens,
        "seconds": answered.seconds,
        "bytes": answered.bytes,
        "learned": facts,
        "obfuscation": {name: fact for name, fact in out.facts.items() if name != "says"},
        "config": {"model": met[0].config, "temperature": options.temperature},
    }
    write_json(options.json, result)
