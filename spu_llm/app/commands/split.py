"""`spu-llm split`: the client keeps both ends of an open model, the provider the middle."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.api.defaults import PROMPT, shipped
from spu_llm.app import limiting, split_shares
from spu_llm.app.options import (
    add_identity_options,
    add_prompt,
    add_ranges,
    add_stop,
    address,
    identity_of,
)
from spu_llm.app.serving import add_sessions, check_serving, run_provider
from spu_llm.app.split_options import (
    EPSILON,
    FEATURES,
    MECHANISMS,
    MODES,
    MPC,
    NOIR,
    PLAIN,
    PRECISIONS,
    split_of,
)
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from spu_llm.service.provider import ServeOptions

BATCH, LENGTH, ROUNDS, SAVE_EVERY, LEARNING_RATE = 16, 64, 200, 10, 1e-3

_ABOUT = (
    "A model that both parties have is split at two block boundaries (NOIR): the client computes "
    "the embedding, the first F blocks, the last B and the head; the provider computes the blocks "
    "between. A token takes a round trip. What the provider learns is the mode's. plain, INSECURE: "
    "rows of the residual stream, off which the whole text can be read. noir: such rows under a "
    "secret codebook and tuned ends; no proof says how little they tell, only attacks that were "
    "tried ('spu-llm attack noir'). Lengths and times show, rows of equal tokens are alike "
    "wherever they stand, and when tuning, equal labels show: a substitution cipher, at best, "
    "hides those texts. mpc: the rows are shared between both; the provider learns the lengths of "
    "prompt and drafts, how many steps there were, when the text ends, whether activations left "
    "their ranges, and with --show-progress how many drafts stay, step by step. In all of them the "
    "client learns what the middle makes of rows of its choice: with enough of them, the middle "
    "itself."
)


def add_command(commands: Any) -> None:
    split = commands.add_parser(
        "split",
        help="the client keeps both ends of a model, the provider the middle",
        description=_ABOUT,
    )
    roles = split.add_subparsers(dest="role", required=True, parser_class=type(split))

    serve = roles.add_parser("serve", help="provider: the middle", description=_ABOUT)
    _common(serve, MODES)
    add_ranges(serve)
    serve.add_argument("--listen", required=True, metavar="HOST:PORT")
    serve.add_argument(
        "--tunings",
        type=Path,
        metavar="DIR",
        help="keep what clients tune of the middle (split tune --lora)",
    )
    add_sessions(serve)
    serve.add_argument("--exit-with-parent", action="store_true", help=argparse.SUPPRESS)
    serve.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)
    split_shares.add_serve_options(serve)
    serve.set_defaults(run=_serve)

    generate = roles.add_parser("generate", help="client: a text", description=_ABOUT)
    _common(generate, MODES)
    generate.add_argument("--server", required=True, metavar="HOST:PORT")
    add_prompt(generate, PROMPT)
    generate.add_argument("--max-new-tokens", type=int, default=32, metavar="N")
    generate.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    generate.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the likeliest that hold mass P",
    )
    add_stop(generate)
    generate.add_argument("--seed", type=int, metavar="S", help="fix sampling")
    generate.add_argument(
        "--secrets",
        type=Path,
        metavar="DIR",
        help="what split tune made: codebook, permutation, tuned ends",
    )
    generate.add_argument(
        "--random-prefix",
        action="store_true",
        help="in noir: put 8 random letters before the prompt: rows of equal "
        "beginnings are then not equal to the bit, but stay alike, and show",
    )
    _precision(generate)
    split_shares.add_client_options(generate)
    generate.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    generate.set_defaults(run=_generate, ranges=None)

    split_shares.add_prepare_command(roles, _common, _ABOUT)

    tune = roles.add_parser(
        "tune",
        help="client: tune both ends on private texts, through the middle",
        description="NOIR's STuning, over the wire: rows go up, rows and then gradients come back. "
        "In noir under a codebook and a permutation that are drawn first and stay in DIR, with "
        "what is tuned and the curve of the loss. Repeated, the command goes on where it was, also "
        "after either party was killed. " + _ABOUT,
    )
    _common(tune, (PLAIN, NOIR))
    tune.add_argument("--server", required=True, metavar="HOST:PORT")
    tune.add_argument(
        "--texts",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help='a text each; of a .jsonl, a JSON object with "text" a line',
    )
    tune.add_argument(
        "--secrets",
        type=Path,
        required=True,
        metavar="DIR",
        help="where all of it is kept; its owner alone may read it",
    )
    tune.add_argument(
        "--mechanism",
        choices=MECHANISMS,
        help="how the codebook is drawn (default: exponential; in plain: none); arr "
        "is as published, and does not hold its epsilon",
    )
    tune.add_argument(
        "--epsilon",
        type=float,
        metavar="E",
        help="of the codebook, all features together (default: as much for each "
        f"as the paper's {EPSILON:g} for {FEATURES})",
    )
    tune.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help="in all (default: %(default)s)"
    )
    tune.add_argument(
        "--batch", type=int, default=BATCH, metavar="B", help="texts a round (default: %(default)s)"
    )
    tune.add_argument(
        "--length",
        type=int,
        default=LENGTH,
        metavar="N",
        help="tokens of each (default: %(default)s)",
    )
    tune.add_argument(
        "--learning-rate",
        type=float,
        default=LEARNING_RATE,
        metavar="R",
        help="Adam's (default: %(default)s)",
    )
    tune.add_argument(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="the provider tunes LoRA of this rank in the middle, and keeps it",
    )
    tune.add_argument(
        "--save-every",
        type=int,
        default=SAVE_EVERY,
        metavar="N",
        help="rounds (default: %(default)s)",
    )
    _precision(tune)
    tune.set_defaults(run=_tune)


def _common(parser: Any, modes: tuple[str, ...]) -> None:
    parser.add_argument("--mode", required=True, choices=modes)
    parser.add_argument(
        "--split",
        default="1,1",
        metavar="F,B",
        help="blocks of the client's front and back (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the model, which both parties have (default: the shipped private one)",
    )
    parser.add_argument(
        "--network",
        choices=("local", "lan", "wan"),
        default="local",
        help="emulate a network (default: local, none)",
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    add_identity_options(parser)


def _precision(parser: Any) -> None:
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="of what crosses the boundaries (default: %(default)s)",
    )


def _serve(options: argparse.Namespace) -> None:
    from spu_llm.app.split_client import say_insecure

    def make(found: argparse.Namespace) -> ServeOptions:
        made = _made(found)
        if found is options:
            say_insecure(options.mode)
        return made

    run_provider(options, make, f"serving the middle ({options.mode}) of")


def _made(options: argparse.Namespace) -> ServeOptions:
    from models.hf import load_config
    from spu_llm.service.provider import ServeOptions
    from spu_llm.systems.split.records import check_front
    from spu_llm.systems.split.served import SplitModel

    check_serving(options)
    model = options.model or shipped("private")
    split = split_of(options)
    split.check(load_config(model, options.ranges))
    check_front(options.mode, split)
    if options.mode == MPC and options.tunings is not None:
        raise InputError("--mode mpc tunes nothing; leave --tunings out")
    of_mode = split_shares.served(options)
    host, port = address(options.listen, "--listen")
    return ServeOptions(
        model=model,
        ranges=options.ranges,
        host=host,
        port=port,
        network=options.network,
        once=options.once,
        sessions=options.sessions,
        studies=False,
        identity=identity_of(options),
        exit_with_parent=options.exit_with_parent,
        system=SplitModel(options.mode, split, options.tunings),
        **limiting.of(options),
        **of_mode,
    )


def _generate(options: argparse.Namespace) -> None:
    from spu_llm.app import split_client

    if options.mode == MPC:
        split_shares.generate(options)
    else:
        split_shares.refuse_elsewhere(options)
        split_client.generate(options)


def _tune(options: argparse.Namespace) -> None:
    from spu_llm.app import split_client

    split_client.tune(options)
