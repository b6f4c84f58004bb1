"""`spu-llm dp`: texts that resemble sensitive references, with differential privacy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from spu_llm.api.defaults import shipped
from spu_llm.app import template_options, two_party_text
from spu_llm.app.options import check_served_model
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import show, tell
from spu_llm.core.errors import InputError

DELTA, BATCH, NEW_TOKENS, TOP_K, ITERATIONS = 1e-6, 8, 64, 50, 3
EPSILONS = (1.0, 3.0, 5.0, 10.0)
_ADJACENCIES = ("replace-by-null", "zero-out", "replace-one", "add-or-remove")
_METHODS = (
    "invisibleink, full-vocabulary, public-only, amin, amin-published, adapmixed, "
    "adapmixed-published, augpe"
)
_ABOUT = (
    "InvisibleInk (Vinod, Pillutla, Thakurta): a model writes texts of its own after the manner of "
    "sensitive ones. Each new text reads a batch of references that no other one reads, and what "
    "any single reference changes is bounded, token by token. Who runs this sees all references."
)


def add_command(commands: Any) -> None:
    dp = commands.add_parser(
        "dp", help="texts from sensitive references, with differential privacy", description=_ABOUT
    )
    parts = dp.add_subparsers(dest="part", required=True, parser_class=type(dp))

    generate = parts.add_parser(
        "generate",
        help="write a corpus, and its privacy statement",
        description=_ABOUT + " Beside FILE: FILE.privacy.json, the statement that goes with it; "
        "FILE.ledger, which stays here. A run that ended early goes on when the command is "
        "repeated, and nothing is spent twice.",
    )
    generate.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="model directory (default: the shipped private one)",
    )
    generate.add_argument(
        "--references",
        type=Path,
        required=True,
        metavar="FILE",
        help='a JSON object with "text" a line; B at a time make a batch, in the order of the file '
        "(but see --adjacency)",
    )
    generate.add_argument(
        "--query", metavar="TEXT", help="public: what each text goes on from; or give templates"
    )
    template_options.add_options(generate)
    generate.add_argument("--texts", type=int, required=True, metavar="N", help="how many")
    generate.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="a JSON object for each text, a line",
    )
    generate.add_argument(
        "--epsilon", type=float, metavar="E", help="what may be spent of every reference's privacy"
    )
    _common(generate)
    generate.add_argument(
        "--top-k",
        type=int,
        default=TOP_K,
        metavar="K",
        help="candidates: the public model's K likeliest and what a reference "
        "could bring among them; 0: all (default: %(default)s)",
    )
    generate.add_argument(
        "--centre",
        action="store_true",
        help="take each reference's median difference out before clipping, which costs nothing",
    )
    generate.add_argument(
        "--reference-tokens",
        type=int,
        metavar="N",
        help="cut references to that (default: what the model's context leaves, 512 at most)",
    )
    generate.add_argument(
        "--method",
        default="invisibleink",
        metavar="NAME",
        help=f"one of {_METHODS} (default: %(default)s)",
    )
    generate.add_argument(
        "--iterations",
        type=int,
        default=ITERATIONS,
        metavar="N",
        help="of augpe (default: %(default)s)",
    )
    two_party_text.add_options(generate)
    generate.add_argument("--debug", action="store_true", help="show a traceback on errors")
    generate.set_defaults(run=_generate)

    account = parts.add_parser(
        "account",
        help="epsilon from the clip norm, or the clip norm from epsilon",
        description="What a text of InvisibleInk spends, without running anything.",
    )
    way = account.add_mutually_exclusive_group()
    way.add_argument(
        "--epsilon",
        type=float,
        action="append",
        metavar="E",
        help="the clip norm for that; may be given again (default: 1, 3, 5, 10)",
    )
    way.add_argument(
        "--clip",
        type=float,
        action="append",
        metavar="C",
        help="epsilon of that clip norm; may be given again",
    )
    account.add_argument(
        "--runs",
        type=int,
        default=1,
        metavar="N",
        help="texts that read the same references, all together (default: %(default)s)",
    )
    _common(account)
    account.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    account.add_argument("--debug", action="store_true", help="show a traceback on errors")
    account.set_defaults(run=_account)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--delta", type=float, default=DELTA, metavar="D", help="default: %(default)s"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=BATCH,
        metavar="B",
        help="references to a text (default: %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=NEW_TOKENS,
        metavar="T",
        help="of a text at most; all are charged (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="TAU", help="default: %(default)s"
    )
    parser.add_argument(
        "--adjacency",
        choices=_ADJACENCIES,
        default=_ADJACENCIES[0],
        help="what epsilon compares: one reference beside nothing, beside logits "
        "of 0, or beside another one; or one that is there or not, and its own words say to which "
        "text it belongs (default: %(default)s)",
    )


def _generate(options: argparse.Namespace) -> None:
    """Generate texts: progress and what is promised to stderr, the texts to `--out`."""
    from spu_llm.app.progress import Progress
    from spu_llm.systems.dp_text import corpus
    from spu_llm.systems.dp_text.statement import summary

    if not options.out.resolve().parent.is_dir():
        raise InputError(f"--out: {options.out.resolve().parent} is not a directory; make it first")
    template_options.check(options)
    if options.server is not None:
        two_party_text.generate(options)
        return
    check_served_model(options)
    if options.top_k < 0:
        raise InputError(f"--top-k must be 0 (all) or more, found {options.top_k}")
    wanted = corpus.CorpusRequest(
        options.method,
        options.epsilon,
        options.delta,
        options.batch,
        options.texts,
        options.max_new_tokens,
        options.temperature,
        options.top_k or None,
        options.adjacency,
        options.centre,
        options.iterations,
    )
    # What can be wrong is found before the model is loaded.
    if wanted.method == "augpe":
        corpus.augpe_for(wanted)
    else:
        corpus.method_for(wanted)
    asked = template_options.asked(options)
    if wanted.method != "augpe":
        corpus.check_number(wanted, [len(some) for some in asked.references.values()])
    progress = Progress()
    try:
        progress.stage("loading the model")
        directory = options.model or shipped("private")
        model, tokenizer = _model(directory)
        room = model.config.context, options.max_new_tokens, options.reference_tokens
        sources = asked.sources(directory, tokenizer, *room)
        written = corpus.write_corpus(options.out, wanted, model, sources, progress.update)
    finally:
        progress.close()
    tell(summary(written))
    show(f"{options.out}, {corpus.statement_path(options.out)}")


def _model(directory: Path) -> Any:
    from models.digest import digest_of
    from models.hf import load_model
    from models.tokenizer import Tokenizer
    from spu_llm.systems.dp_text.corpus import Model
    from spu_llm.systems.dp_text.lanes import folded

    config, params = load_model(directory)
    tokenizer = Tokenizer.load(directory)
    return Model(config, folded(config, params), digest_of([params])), tokenizer


def _account(options: argparse.Namespace) -> None:
    from spu_llm.systems.dp_text.accounting import loose_epsilon_of
    from spu_llm.systems.dp_text.parameters import Parameters, check_budget

    check_output(options.json)
    if options.runs < 1:
        raise InputError(f"--runs must be 1 or more, found {options.runs}")
    tokens = options.runs * options.max_new_tokens
    check_budget(1.0, options.delta)
    if options.clip:
        several = [
            Parameters(options.batch, clip, options.temperature, tokens, None, options.adjacency)
            for clip in options.clip
        ]
    else:
        several = [
            Parameters.for_budget(
                epsilon,
                options.delta,
                batch=options.batch,
                temperature=options.temperature,
                max_new_tokens=tokens,
                adjacency=options.adjacency,
            )
            for epsilon in options.epsilon or EPSILONS
        ]
    rows = [
        {
            "epsilon": p.epsilon(options.delta),
            "epsilon_loose": loose_epsilon_of(p.rho, options.delta),
            "rho": p.rho,
            "rho_token": p.rho_token,
            "clip": p.clip,
            "slack": 2 * p.clip / p.batch,
        }
        for p in several
    ]
    heads = ("epsilon", "loosely", "rho", "rho of a token", "C", "top-k+ adds within")
    names = ("epsilon", "epsilon_loose", "rho", "rho_token", "clip", "slack")
    show(
        f"{options.adjacency}, delta {options.delta:g}, B = {options.batch}, tau = "
        f"{options.temperature:g}, T = {options.max_new_tokens}"
        + (f", {options.runs} texts of the same references" if options.runs > 1 else "")
    )
    for line in [heads, *[[f"{row[name]:.6g}" for name in names] for row in rows]]:
        show("".join(f"{cell:>20}" for cell in line))
    write_json(
        options.json,
        {
            "adjacency": options.adjacency,
            "delta": options.delta,
            "batch": options.batch,
            "temperature": options.temperature,
            "max_new_tokens": options.max_new_tokens,
            "runs": options.runs,
            "rows": rows,
        },
    )
