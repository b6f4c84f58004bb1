"""Options of `spu-llm split`, and what each mode tells the provider."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spu_llm.api.defaults import DRAFT_LENGTH, PROMPT
from spu_llm.app.options import (
    add_hint_cache,
    add_identity_options,
    add_network,
    add_prompt,
    add_ranges,
    add_stop,
)
from spu_llm.app.serving import add_sessions
from spu_llm.core.errors import InputError
from spu_llm.systems.decoding.limits import MAX_DRAFTS
from spu_llm.systems.split.modes import (
    ENDS,
    EPSILON,
    FEATURES,
    LEAVE_OUT,
    MECHANISMS,
    MODES,
    MPC,
    NOIR,
    PLAIN,
    PRECISIONS,
    TUNED,
)

BATCH, LENGTH, ROUNDS, SAVE_EVERY, LEARNING_RATE = 16, 64, 200, 10, 1e-3
TEMPERATURE = 0.25  # of programs, the paper's
MOST_TOKENS = 4096  # whose probabilities fit into memory at once

Run = Callable[[argparse.Namespace], None]

# Of mode mpc alone, with what they are where they are left out.
_OF_TEXT = {"standard": False, "pool": None, "jobs": None, "hint_cache": None}
_OF_SERVE = {"pool": None, "jobs": None}

ABOUT = (
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


def add_serve(roles: Any, run: Run) -> None:
    serve = roles.add_parser("serve", help="provider: the middle", description=ABOUT)
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
    _add_serve_on_shares(serve)
    serve.set_defaults(run=run)


def add_generate(roles: Any, run: Run) -> None:
    generate = roles.add_parser("generate", help="client: a text", description=ABOUT)
    _common(generate, MODES)
    generate.add_argument("--server", required=True, metavar="HOST:PORT")
    add_prompt(generate, PROMPT)
    generate.add_argument("--max-new-tokens", type=int, default=32, metavar="N")
    _sampling(generate, 0.7)
    add_stop(generate)
    _seed_and_secrets(
        generate,
        "the prompt: rows of equal beginnings are then not equal to the bit, but stay alike, and "
        "show",
    )
    _precision(generate)
    _add_text_on_shares(generate)
    generate.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    generate.set_defaults(run=run, ranges=None)


def add_solve(roles: Any, run: Run) -> None:
    solve = roles.add_parser(
        "solve",
        help="client: programs for tasks with tests",
        description="Completions of programming tasks, for 'split score': those of a task are a "
        "session, and are appended to --completions as JSON Lines. Repeated, the command makes "
        "what is missing. The untouched model is --mode plain without --secrets. " + ABOUT,
    )
    _common(solve, (PLAIN, NOIR))
    solve.add_argument("--server", required=True, metavar="HOST:PORT")
    _tasks(solve)
    solve.add_argument(
        "--completions", type=Path, required=True, metavar="FILE", help="where they are appended"
    )
    solve.add_argument(
        "--samples",
        type=int,
        default=2,
        metavar="N",
        help="completions of each task; Pass@r takes r, the paper 2 r (default: %(default)s)",
    )
    solve.add_argument(
        "--chat",
        action="store_true",
        help="ask in a chat, by the model's template, for the whole program: for models that are "
        "tuned to follow instructions",
    )
    solve.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    _sampling(solve, TEMPERATURE, ", the paper's")
    _seed_and_secrets(solve, "each prompt")
    _precision(solve)
    solve.set_defaults(
        run=run,
        ranges=None,
        pool=None,
        jobs=None,
        hint_cache=None,
        standard=False,
        draft_length=None,
    )


def add_score(roles: Any, run: Run) -> None:
    score = roles.add_parser(
        "score",
        help="run the tests of programs: Pass@r, Fusi, and who wins",
        description="Run programs that a model wrote, each with the tests of its task, and print "
        "Pass@r, Fusi against the reference (NOIR, Eq. 1) and for how many tasks the completions "
        "would win by the paper's rules, were they an attacker's reconstructions. A program has a "
        "process of its own without network, other programs, threads, and files but Python's "
        "libraries and an empty folder (Landlock, seccomp). Where this machine has not both, "
        "nothing is run.",
    )
    _tasks(score)
    score.add_argument(
        "--completions",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSON Lines {"task_id": ..., "completion": "..."}, as many of a task as there are; '
        "what split solve made",
    )
    score.add_argument(
        "--r",
        type=_numbers,
        metavar="R,...",
        help="of Pass@r (default: 1 and 10, as far as there are completions)",
    )
    score.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        metavar="S",
        help="of CPU time that a program may take to load, and for each test; ten times that by "
        "the wall clock (default: %(default)g)",
    )
    score.add_argument(
        "--memory", type=int, default=1024, metavar="MB", help="of a program (default: %(default)s)"
    )
    score.add_argument(
        "--jobs", type=int, metavar="N", help="programs at a time (default: one a core)"
    )
    score.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    score.add_argument("--debug", action="store_true", help="show a traceback on errors")
    score.set_defaults(run=run)


def _tasks(parser: Any) -> None:
    parser.add_argument(
        "--tasks",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON Lines in the layout of HumanEval (task_id, prompt, canonical_solution, test, "
        "entry_point) or MBPP (task_id, text, code, test_list, test_setup_code)",
    )


def _numbers(given: str) -> tuple[int, ...]:
    """Return whole numbers between commas."""
    try:
        return tuple(dict.fromkeys(int(number) for number in given.split(",")))
    except ValueError:
        raise InputError(f"--r must be whole numbers like 1,10, found {given!r}") from None


def add_prepare(roles: Any, run: Run) -> None:
    prepare = roles.add_parser(
        "prepare",
        help="client: correlated randomness for a text in mode mpc, ahead of time",
        description="Both parties make what a text takes, which then finds it in --pool: give it "
        "the same options, and a prompt of the same length. " + ABOUT,
    )
    _common(prepare, (MPC,))
    prepare.add_argument("--server", required=True, metavar="HOST:PORT")
    add_prompt(prepare, PROMPT, "for its length alone (default: that of demo); ", of_length=True)
    prepare.add_argument("--max-new-tokens", type=int, default=32, metavar="N")
    prepare.add_argument(
        "--steps",
        type=int,
        metavar="K",
        help="default: --max-new-tokens at three a step, with --standard at one",
    )
    _drafts(prepare)
    prepare.add_argument(
        "--pool", type=Path, required=True, metavar="DIR", help="where the client's half is kept"
    )
    prepare.add_argument(
        "--disk",
        type=int,
        metavar="MB",
        help="make no more than fits, if --pool is to hold so much in all",
    )
    _jobs(prepare)
    add_hint_cache(prepare)
    prepare.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    prepare.set_defaults(run=run, ranges=None, secrets=None)


def add_tune(roles: Any, run: Run) -> None:
    tune = roles.add_parser(
        "tune",
        help="client: tune both ends on private texts, through the middle",
        description="NOIR's STuning, over the wire: rows go up, rows and then gradients come back. "
        "In noir under a codebook and a permutation that are drawn first and stay in DIR, with "
        "what is tuned and the curve of the loss. Repeated, the command goes on where it was, also "
        "after either party was killed. " + ABOUT,
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
        "--leave-out",
        choices=LEAVE_OUT,
        default="",
        help="noir without one of its two secrets, INSECURE, to see what it is for: without the "
        "codebook prompts are read off rows, without the permutation texts off gradients",
    )
    tune.add_argument(
        "--tuned",
        choices=TUNED,
        default=ENDS,
        help="what is tuned: both ends, or the back alone (default: %(default)s)",
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
    tune.set_defaults(run=run, ranges=None, pool=None, jobs=None, hint_cache=None)


def add_spent(roles: Any, run: Run) -> None:
    spent = roles.add_parser(
        "spent",
        help="what a codebook's mechanisms spend on a model's table, beside what they are given",
        description="For one feature of a token table and each mechanism of 'split tune': what its "
        "probabilities as printed sum to (Eq. 2), and the logarithm of the largest ratio of "
        "probabilities, of one token's values (of which NOIR's Theorem 1 is proved) and of one "
        "value for two tokens (which epsilon is about).",
    )
    spent.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="whose table it is (default: the shipped private one)",
    )
    spent.add_argument(
        "--epsilon",
        type=float,
        default=EPSILON / FEATURES,
        metavar="E",
        help="of this feature (default: %(default).6g, the paper's)",
    )
    spent.add_argument(
        "--tokens",
        type=int,
        default=1024,
        metavar="N",
        help=f"the table's first ones, {MOST_TOKENS} at most (default: %(default)s)",
    )
    spent.add_argument(
        "--feature", type=int, default=0, metavar="I", help="its column (default: %(default)s)"
    )
    spent.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    spent.add_argument("--debug", action="store_true", help="show a traceback on errors")
    spent.set_defaults(run=run)


def add_bounds(roles: Any, run: Run) -> None:
    bounds = roles.add_parser(
        "bounds",
        help="how likely rows give a prompt away: NOIR's theorems as stated, and as they hold",
        description="NOIR's Theorem 3, Proposition 1 (Eq. 4) and Theorem 4 (Eq. 5), and what is "
        "true in their place: for a mechanism that holds epsilon, which the paper's own (arr) does "
        "not ('split tune --mechanism'), and for tokens that do not follow from each other.",
    )
    size = bounds.add_mutually_exclusive_group()
    size.add_argument("--vocab-size", type=int, metavar="N", help="tokens that there are")
    size.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="take its vocabulary (default: the shipped private one)",
    )
    bounds.add_argument(
        "--epsilon",
        type=float,
        default=EPSILON,
        metavar="E",
        help="of all features together (default: %(default)s, the paper's)",
    )
    bounds.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="of the prompt (default: %(default)s)"
    )
    bounds.add_argument(
        "--share",
        type=float,
        default=0.2,
        metavar="RHO",
        help="of its tokens, which must be guessed for it to count as read (default: %(default)s)",
    )
    bounds.add_argument(
        "--advantage",
        type=float,
        default=0.146,
        metavar="G",
        help="that neighbours add to the chance of a guess (default: %(default)s, the paper's)",
    )
    bounds.add_argument(
        "--prior",
        type=float,
        metavar="P",
        help="chance of the token before anything is seen (default: 1 / N, as in Theorem 3; text's "
        "most frequent token has far more)",
    )
    bounds.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    bounds.add_argument("--debug", action="store_true", help="show a traceback on errors")
    bounds.set_defaults(run=run)


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
    add_network(parser)
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    add_identity_options(parser)


def _sampling(parser: Any, temperature: float, whose: str = "") -> None:
    """Add how tokens are drawn; `whose`: a word on where the default temperature is from."""
    parser.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0 is greedy (default: %(default)s{whose})",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the likeliest that hold mass P",
    )


def _seed_and_secrets(parser: Any, prompts: str) -> None:
    """Add the seed, the client's secrets, and random letters before `prompts`."""
    parser.add_argument("--seed", type=int, metavar="S", help="fix sampling")
    parser.add_argument(
        "--secrets",
        type=Path,
        metavar="DIR",
        help="what split tune made: codebook, permutation, tuned ends",
    )
    parser.add_argument(
        "--random-prefix",
        action="store_true",
        help=f"in noir: put 8 random letters before {prompts}",
    )


def _precision(parser: Any) -> None:
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="of what crosses the boundaries (default: %(default)s)",
    )


def _add_serve_on_shares(parser: Any) -> None:
    parser.add_argument(
        "--pool",
        type=Path,
        metavar="DIR",
        help="in mpc: keep what is made ahead of time, for each client that does",
    )
    parser.add_argument(
        "--disk",
        type=int,
        metavar="MB",
        help="keep no more than that in --pool, else in --tunings, for all clients together",
    )
    _jobs(parser)


def _add_text_on_shares(parser: Any) -> None:
    """Add the options that a text takes in mode mpc."""
    _drafts(parser)
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="in mpc: draw among the K likeliest tokens"
    )
    parser.add_argument(
        "--pool",
        type=Path,
        metavar="DIR",
        help="in mpc: keep what is made ahead of time, if the provider does",
    )
    _jobs(parser)
    add_hint_cache(parser, "in mpc: ")


def _drafts(parser: Any) -> None:
    parser.add_argument(
        "--draft-length",
        type=int,
        metavar="G",
        help=f"in mpc: drafts a step, 1 to {MAX_DRAFTS} (default: {DRAFT_LENGTH})",
    )
    parser.add_argument(
        "--standard", action="store_true", help="in mpc: no drafting, one token a step"
    )
    parser.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR",
        help="in mpc: the model that drafts (default: the shipped public one)",
    )
    parser.add_argument(
        "--show-progress",
        action="store_true",
        help="in mpc: the provider learns how many drafts stay, step by step: somewhat cheaper",
    )


def _jobs(parser: Any) -> None:
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="in mpc: cores that make correlated randomness, if the other party gives as many "
        "(default: all)",
    )


def check_text(options: argparse.Namespace) -> None:
    """Raise InputError for an option of `generate` that its mode has not."""
    if options.mode != MPC:
        _refuse(options, _OF_TEXT, MPC)
    elif options.secrets is not None:
        raise InputError("--secrets is of --mode noir; leave it out")


def check_serving(options: argparse.Namespace) -> None:
    """Raise InputError for an option of `serve` that its mode has not, or that bounds nothing."""
    if options.mode == MPC and options.tunings is not None:
        raise InputError("--mode mpc tunes nothing; leave --tunings out")
    if options.mode != MPC:
        _refuse(options, _OF_SERVE, MPC)
    kept = "pool" if options.mode == MPC else "tunings"
    for option in ("disk", "client-disk"):
        given = getattr(options, option.replace("-", "_"))
        if given is not None and getattr(options, kept) is None:
            raise InputError(f"--{option} bounds what is kept in --{kept}; give both")


def _refuse(options: argparse.Namespace, left_out: dict[str, Any], mode: str) -> None:
    for name, value in left_out.items():
        if getattr(options, name) != value:
            raise InputError(f"--{name.replace('_', '-')} is of --mode {mode}; leave it out")
