"""`spu-llm gateway`: an HTTP server at the client, for programs that speak OpenAI's or Anthropic's
protocol.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.app import drafting
from spu_llm.app.options import (
    add_backend,
    add_folder,
    add_hint_cache,
    add_identity_options,
    add_jobs,
    add_pairs,
    add_ranges,
    add_ray,
    add_served_model,
    add_session_options,
    address,
    check_pairs,
    doors_of,
    provider_of,
)
from spu_llm.app.printing import show
from spu_llm.core.errors import InputError
from spu_llm.core.settings import OWN
from spu_llm.core.text_files import read_text

if TYPE_CHECKING:
    from spu_llm.api.client import Client, CompletionOptions
    from spu_llm.api.conversation import Ahead

LISTEN = "127.0.0.1:8000"
UNNAMED = "private"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
_MOST_AT_ONCE = 16
_BACKLOG = 64
_END_S = 3  # for answers that are being written when it ends


def add_command(commands: Any) -> None:
    gateway = commands.add_parser(
        "gateway",
        help="client: answer programs that speak OpenAI's or Anthropic's protocol",
        description="Programs on this machine ask it over HTTP, as they ask OpenAI or Anthropic; "
        "it asks the provider by two-party computation. Prompts and answers leave this machine on "
        "shares alone.",
    )
    place = gateway.add_mutually_exclusive_group(required=True)
    place.add_argument("--server", metavar="HOST:PORT", help="the provider")
    add_folder(place, "--model", "a model directory: both parties run on this machine")
    add_ranges(gateway)
    add_served_model(gateway)
    gateway.add_argument(
        "--listen",
        default=LISTEN,
        metavar="HOST:PORT",
        help="where programs ask it; beyond this machine only with --token-file "
        "(default: %(default)s)",
    )
    gateway.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="a file whose first line every program must give as its API key",
    )
    gateway.add_argument(
        "--name",
        metavar="NAME",
        help="of the only model, in requests (default: the name that the provider has for it, or "
        f"{UNNAMED})",
    )
    gateway.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="requests that are answered at a time; others wait (default: %(default)s)",
    )
    gateway.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="chats whose sessions stay open for their next turns; one more is opened for the next "
        "chat, except with --pool; each has a place at the provider (default: 1)",
    )
    gateway.add_argument(
        "--ahead-turn",
        type=int,
        default=32,
        metavar="N",
        help="tokens of a chat's turn that correlated randomness is made for while nobody asks; "
        "0: none is (default: %(default)s)",
    )
    gateway.add_argument(
        "--ahead-answer",
        type=int,
        default=32,
        metavar="N",
        help="tokens of the answer that it is made for, too (default: %(default)s)",
    )
    drafting.add_options(gateway)
    add_backend(gateway)
    add_session_options(gateway)
    add_jobs(gateway)
    add_hint_cache(gateway)
    add_folder(gateway, "--pool", "keep what is made ahead of time, if the provider does")
    add_ray(gateway, "whose machines fill --pool, in pairs with the provider's sessions")
    add_pairs(gateway)
    add_identity_options(gateway)
    gateway.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    import uvicorn

    from spu_llm.api.client import CompletionOptions
    from spu_llm.api.conversation import CONVERSATION_TOKENS
    from spu_llm.gateway.kept import Kind
    from spu_llm.gateway.running import Requests
    from spu_llm.gateway.server import Gateway

    host, port = address(options.listen, "--listen")
    token = _token(options.token_file)
    here = _is_loopback(host)
    if not here and token is None:
        raise InputError(
            f"--listen {options.listen} is reached from other machines; give --token-file FILE, or "
            f"listen at {LISTEN}"
        )
    if not 1 <= options.at_once <= _MOST_AT_ONCE:
        raise InputError(f"--at-once must be 1 to {_MOST_AT_ONCE}, found {options.at_once}")
    if options.pool is not None and ((options.keep or 0) > 1 or options.at_once > 1):
        raise InputError(
            "one session at a time has --pool; give --keep 0 or 1 and leave --at-once out, or "
            "leave --pool out"
        )
    keep = 1 if options.keep is None else options.keep
    if not 0 <= keep <= _MOST_AT_ONCE:
        raise InputError(f"--keep must be 0 to {_MOST_AT_ONCE}, found {keep}")
    drafting.check(options)
    check_pairs(options)
    clients = _clients(options)
    asked = CompletionOptions(
        draft_length=options.draft_length, draft_model=options.draft_model, drafts=options.drafts
    )
    # Says early where the provider cannot be asked.
    texts = {name: client.provider.text_format().text for name, client in clients.items()}
    chats = [name for name, text in texts.items() if text.template is not None]
    ahead = _ahead(options) if chats else None
    if options.ray is not None:
        _begin_stocking(options, clients, asked, ahead)
    requests = Requests(clients, options.at_once, keep, ahead)
    hosts = LOOPBACK | {host, _bracketed(host)} if here else None
    first = Kind([*chats, *clients][0], replace(asked, max_new_tokens=CONVERSATION_TOKENS))
    gateway = Gateway(requests, asked, first, token, hosts)
    server = uvicorn.Server(
        uvicorn.Config(
            gateway.application(),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_END_S,
        )
    )
    with _listening(host, port) as listener:
        at = f"http://{_bracketed(host)}:{listener.getsockname()[1]}"
        show(
            f"listening on {at}",
            f"base URL {at}/v1 for OpenAI's protocol, {at} for Anthropic's; "
            f"{'models' if len(clients) > 1 else 'model'} {', '.join(clients)}",
            f"a page to chat: {at}/",
        )
        try:
            server.run(sockets=[listener])
        finally:
            requests.abandon()  # where a second Ctrl-C left sessions open


def _begin_stocking(
    options: argparse.Namespace,
    clients: dict[str, Client],
    asked: CompletionOptions,
    ahead: Ahead | None,
) -> None:
    """Have a cluster fill the stock that chats take from."""
    from spu_llm.app import stocking

    client = next(iter(clients.values()))
    stocking.check(client.provider.server, options.pool, len(clients), ahead)
    assert ahead is not None
    stocking.begin(client, asked, ahead, options.ray, options.pairs, doors_of(options), show)


def _clients(options: argparse.Namespace) -> dict[str, Client]:
    """Return who asks for each model, by the model's name in requests; InputError where an option
    is of one model alone and the provider has several.
    """
    from spu_llm.api.client import Client
    from spu_llm.service.first_contact import model_names

    provider = provider_of(options)
    server = provider.server
    if server is None or server.served_model:
        name = "" if server is None else server.served_model
        return {options.name or name or UNNAMED: Client(provider)}
    names = model_names(server)
    if len(names) < 2:
        return {options.name or next(iter(names), UNNAMED): Client(provider)}
    for one, value in (("--name", options.name), ("--draft-model", options.draft_model)):
        if value is not None:
            raise InputError(
                f"{one} is of one model, but the provider serves {', '.join(names)}; choose by "
                "--served-model, or leave it out"
            )
    return {
        name: Client(replace(provider, server=replace(server, served_model=name))) for name in names
    }


def _ahead(options: argparse.Namespace) -> Ahead | None:
    """Return what is made before a turn comes; None where nothing can be, or is to be."""
    from spu_llm.api.conversation import Ahead
    from spu_llm.systems.decoding.chat_request import MOST_AHEAD_STEPS, MOST_TURN_ROWS

    turn, answer = options.ahead_turn, options.ahead_answer
    if not 0 <= turn <= MOST_TURN_ROWS:
        raise InputError(f"--ahead-turn must be 0 to {MOST_TURN_ROWS}, found {turn}")
    if not 0 <= answer <= MOST_AHEAD_STEPS:
        raise InputError(f"--ahead-answer must be 0 to {MOST_AHEAD_STEPS}, found {answer}")
    if not turn or options.backend != OWN:
        return None
    return Ahead(turn, answer)


def _token(file: Path | None) -> str | None:
    """Return the token in a file; InputError where it is short, or has other characters than a
    header bears.
    """
    if file is None:
        return None
    token = read_text(file, "--token-file").partition("\n")[0].strip()
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise InputError(
            f"{file}: the first line must be a token of 16 printable ASCII characters or more; "
            "openssl rand -hex 32 makes one"
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; InputError where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise InputError(
            f"--listen {host}:{port}: {error.strerror or error}; give another address"
        ) from None
