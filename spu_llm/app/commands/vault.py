"""`spu-llm vault`: confidential prompting as published, with a vault that is trusted."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.api.defaults import PROMPT
from spu_llm.app import reloading, span_options
from spu_llm.app.options import add_prompt, address, given
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import say, show, tell
from spu_llm.core.errors import InputError
from spu_llm.core.units import mb

if TYPE_CHECKING:
    from spu_llm.vault.attested import Policy
    from spu_llm.vault.told import Place

LANES = 64
RATE, BURST = 4096, 16384  # a handshake, then some fifty tokens a second

_ABOUT = (
    "Vault mode (Gim, Li, Zhong: Confidential Prompting). A vault is a process that the user "
    "trusts with the prompt: it keeps the prompt's keys and values while the model's owner "
    "generates. It belongs into a confidential virtual machine, which is the operator's part; user "
    "and owner can ask for evidence of it (--policy). The owner trusts the vault with the weights, "
    "which pass through it at every prefill. NOT protected from the owner's engine: all generated "
    "text; and by its answers, the prompt itself ('spu-llm attack' finds it). For a prompt that "
    "nobody else may learn use 'spu-llm generate'."
)
_SPANS = (
    "A prompt may mark what stays with the vault, <confidential>...</confidential> (by default all "
    "of it), and in that what not even the engine's computing is to give away, "
    "<redacted>...</redacted>: fake prompts go out beside it, with other text there."
)
_GUARD = (
    "Pass users' connections to a vault, and of what it answers no more than this: a vault reads "
    "the weights, and what it says is encrypted. It must have no other way out of its machine."
)
_PUBLISHED = (
    "make fakes as the paper prints it, or as its authors' program does, share their keys and "
    "values, and give the engine those of all public text: broken, for study ('spu-llm attack')"
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
    _policy(serve, "before weights go there")
    _common(serve)
    serve.set_defaults(run=_serve)

    keep = roles.add_parser("open", help="a user's vault", description=_ABOUT)
    keep.add_argument("--server", required=True, metavar="HOST:PORT", help="the engine")
    keep.add_argument("--listen", required=True, metavar="HOST:PORT", help="for the user")
    _identity(keep, "--trust", "the engine")
    keep.add_argument(
        "--trust-user", type=Path, metavar="FILE", help="certificates, in PEM form, of the user"
    )
    keep.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR",
        help="public model that makes fakes here, for a user with --fakes-in-vault (default: the "
        "shipped one)",
    )
    keep.add_argument(
        "--secrets",
        type=Path,
        metavar="DIR",
        help="a folder that keeps account of what this vault has hidden before",
    )
    keep.add_argument(
        "--evidence",
        type=Path,
        metavar="FILE",
        help="a token of an attestation service about this machine, for user and engine; read "
        "again for each request",
    )
    _common(keep)
    keep.set_defaults(run=_open)

    watch = roles.add_parser(
        "guard", help="the owner's bound on what leaves a vault", description=_GUARD
    )
    watch.add_argument("--vault", required=True, metavar="HOST:PORT")
    watch.add_argument("--listen", required=True, metavar="HOST:PORT", help="for the user")
    for option, default, text in (
        ("--rate", RATE, "bytes a second that may leave, of all connections together"),
        ("--burst", BURST, "bytes that may leave at once"),
    ):
        watch.add_argument(
            option, type=int, default=default, metavar="BYTES", help=f"{text} (default: {default})"
        )
    watch.add_argument(
        "--most", type=int, metavar="BYTES", help="in all, after which nothing may (default: any)"
    )
    watch.add_argument(
        "--model", type=Path, metavar="DIR", help="say how long weights of this model would take"
    )
    watch.add_argument("--debug", action="store_true", help="show a traceback on errors")
    watch.set_defaults(run=_guard)

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
    spans = generate.add_argument_group("spans", _SPANS)
    span_options.add_options(spans)
    span_options.add_as_published(spans, _PUBLISHED)
    spans.add_argument(
        "--fakes-in-vault",
        type=Path,
        metavar="DIR",
        help="have the vault make the fakes, by a model of its own; the folder, made where there "
        "is none, keeps a key that says which answer is yours",
    )
    _identity(generate, "--trust", "the vault")
    _policy(generate, "before the prompt goes there")
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


def _policy(parser: Any, when: str) -> None:
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help=f"what a vault's evidence has to say, {when}: a JSON object with key (a PEM file), "
        "algorithm, issuer, certificate_claim and claims",
    )


def _policy_of(options: argparse.Namespace) -> Policy | None:
    from spu_llm.vault.attested import Policy

    if options.policy is not None and options.insecure:
        raise InputError("--policy is of certificates; leave --insecure out")
    return None if options.policy is None else Policy.read(options.policy)


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

    policy = _policy_of(options)

    def make(renewed: argparse.Namespace) -> EngineOptions:
        if not 1 <= renewed.lanes <= MAX_LANES:
            raise InputError(f"--lanes must be 1 to {MAX_LANES}, found {renewed.lanes}")
        place = _place(renewed, renewed.listen, "--listen", renewed.trust)
        return EngineOptions(
            renewed.model,
            place.host,
            place.port,
            renewed.lanes,
            place.identity,
            policy,
            renewed.exit_with_parent,
        )

    served, renewal = reloading.loaded(options, make, lambda made: {"trust": made.identity})
    serve(served, say, _listening(f"engine of {served.model}", served.host), renewal=renewal)


def _open(options: argparse.Namespace) -> None:
    from spu_llm.api.defaults import shipped
    from spu_llm.vault.keeper import VaultOptions, keep
    from spu_llm.vault.making import Maker

    def make(renewed: argparse.Namespace) -> VaultOptions:
        engine = _place(renewed, renewed.server, "--server", renewed.trust)
        user = _place(renewed, renewed.listen, "--listen", renewed.trust_user)
        maker = Maker(renewed.draft_model or shipped("public"), renewed.secrets)
        return VaultOptions(engine, user, maker, renewed.evidence, renewed.exit_with_parent)

    opened, renewal = reloading.loaded(
        options,
        make,
        lambda made: {"trust": made.engine.identity, "trust-user": made.listen.identity},
    )
    keep(opened, say, _listening("vault", opened.listen.host), renewal)


def _guard(options: argparse.Namespace) -> None:
    import asyncio

    from spu_llm.vault.guard import CHUNK_BYTES, GuardOptions, guard

    for name, least in (("rate", 1), ("burst", CHUNK_BYTES), ("most", CHUNK_BYTES)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f"--{name} must be {least} or more, found {value}")
    guarded = GuardOptions(
        address(options.vault, "--vault"),
        address(options.listen, "--listen"),
        options.rate,
        options.burst,
        options.most,
    )
    if options.model is not None:
        size = _bytes_of_weights(options.model)
        days = max(0, size - options.burst) / options.rate / 86_400
        within = "" if options.most is None else f"; {mb(options.most)} may in this run"
        tell(f"weights as they are stored, {mb(size)}, take {days:.2g} days to leave{within}")
    asyncio.run(guard(guarded, say, _listening("guard", guarded.listen[0])))


def _bytes_of_weights(model: Path) -> int:
    """Return the size of the files that hold a model's weights."""
    from models.hf import load_config

    load_config(model)
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def _generate(options: argparse.Namespace) -> None:
    """Stream the text to stdout, progress to stderr, the result to `--json`."""
    from spu_llm.api.obfuscation import ObfuscationOptions
    from spu_llm.api.vault import VaultOptions, complete_by_vault
    from spu_llm.app.screen import Screen, learned_lines

    check_output(options.json)
    place = _place(options, options.vault, "--vault", options.trust)
    asked = given(VaultOptions, options)
    asked = replace(asked, obfuscation=given(ObfuscationOptions, options))
    with closing(Screen("")) as screen:
        made = complete_by_vault(
            place,
            options.prompt,
            asked,
            screen.on_event,
            tokenizer=options.tokenizer,
            policy=_policy_of(options),
        )
        screen.finish()
    seconds, sent = made.seconds, made.bytes
    figures = (
        f"{len(made.token_ids)} tokens in {made.elapsed_seconds:.1f} s: prefill "
        f"{seconds['prefill']:.1f} s, {mb(sum(sent['prefill'].values()))} of weights; decoding "
        f"{seconds['decode']:.1f} s, {mb(sum(sent['decode'].values()))} between vault and engine"
    )
    tell(*learned_lines(made.learned), figures)
    write_json(options.json, made.to_json())
