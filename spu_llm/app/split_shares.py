"""Mode mpc of `spu-llm split`: what its commands take beside those of the other modes, and do."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from spu_llm.api.defaults import DRAFT_LENGTH, PROMPT, shipped
from spu_llm.app import drafting
from spu_llm.app.options import add_hint_cache, add_prompt, jobs_of, megabytes, provider_of
from spu_llm.app.printing import show_table
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer
    from spu_llm.systems.split.secure_records import MiddleRequest

R = TypeVar("R", bound="MiddleRequest")

# Of this mode alone, with what they are where they are left out.
_OF_GENERATE = {
    "draft_length": None,
    "standard": False,
    "draft_model": None,
    "show_progress": False,
    "top_k": None,
    "pool": None,
    "jobs": None,
    "hint_cache": None,
}
_ELSEWHERE = {"secrets": None, "random_prefix": False, "precision": "float32"}
_OF_SERVE = {"pool": None, "jobs": None}


def add_serve_options(parser: Any) -> None:
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


def add_client_options(parser: Any) -> None:
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


def add_prepare_command(roles: Any, common: Any, about: str) -> None:
    """Add `split prepare`. common: adds what all commands of `split` take, for modes that are
    named.
    """
    prepare = roles.add_parser(
        "prepare",
        help="client: material for a text in mode mpc, ahead of time",
        description="Both parties make what a text takes, which then finds it in --pool: give it "
        "the same options, and a prompt of the same length. " + about,
    )
    common(prepare, ("mpc",))
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
    prepare.set_defaults(run=_prepare, ranges=None)


def _drafts(parser: Any) -> None:
    parser.add_argument(
        "--draft-length",
        type=int,
        metavar="G",
        help=f"in mpc: drafts a step, 1 to 16 (default: {DRAFT_LENGTH})",
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
        help="in mpc: cores that make material, if the other party gives as many (default: all)",
    )


def refuse_elsewhere(options: argparse.Namespace) -> None:
    """Raise InputError for an option of this mode in another one."""
    of_mode = _OF_SERVE if options.role == "serve" else _OF_GENERATE
    for name, left_out in of_mode.items():
        if getattr(options, name) != left_out:
            raise InputError(f"--{name.replace('_', '-')} is of --mode mpc; leave it out")


def served(options: argparse.Namespace) -> dict[str, Any]:
    """Return fields of `ServeOptions`: material is this mode's alone."""
    if options.mode != "mpc":
        refuse_elsewhere(options)
    kept = "pool" if options.mode == "mpc" else "tunings"
    for option in ("disk", "client-disk"):
        asked = getattr(options, option.replace("-", "_"))
        if asked is not None and getattr(options, kept) is None:
            raise InputError(f"--{option} bounds what is kept in --{kept}; give both")
    return {
        "pool": options.pool,
        "disk_bytes": megabytes(options, "disk"),
        "jobs": jobs_of(options, 1),
    }


def generate(options: argparse.Namespace) -> None:
    """Stream the text to stdout, progress and the summary to stderr, the result to `--json`."""
    from models.tokenizer import Tokenizer
    from spu_llm.api.completion import CompletionCall, complete
    from spu_llm.app.output import check_output, write_json
    from spu_llm.app.screen import Screen
    from spu_llm.systems.decoding.request import check_sampling
    from spu_llm.systems.split.secure_records import SPLIT_COMPLETION, MiddleInputs, MiddleRequest

    for name, left_out in _ELSEWHERE.items():
        if getattr(options, name) != left_out:
            raise InputError(f"--{name.replace('_', '-')} is of --mode noir; leave it out")
    provider, model = provider_of(options), options.model or shipped("private")
    drafts = _draft_length(options)
    check_output(options.json)
    with closing(Screen(options.prompt)) as screen:
        directory = (options.draft_model or shipped("public")) if drafts else model
        tokenizer = Tokenizer.load(directory)
        prompt = _encoded(options.prompt, tokenizer)
        inputs = MiddleInputs(
            prompt,
            str(model),
            str(directory),
            options.temperature,
            options.top_k or 0,
            options.top_p,
            options.stop,
            options.seed,
            options.seed,
        )
        check_sampling(inputs.sampling)
        request = _request(MiddleRequest, options, model, len(prompt), drafts)
        asked = CompletionCall(
            request,
            inputs,
            provider,
            tokenizer,
            program=SPLIT_COMPLETION,
            model=model,
            started=options.started,
        )
        result = complete(asked, screen.on_event, screen.say)
        screen.finish()
    screen.summary(result)
    write_json(options.json, result.to_json())


def _prepare(options: argparse.Namespace) -> None:
    """Prepare material: progress to stderr, what was made to stdout, the result to `--json`."""
    from models.tokenizer import Tokenizer
    from spu_llm.api.preparation import likely_steps, prepare
    from spu_llm.app.material import material_table
    from spu_llm.app.output import check_output, write_json
    from spu_llm.app.screen import Stages
    from spu_llm.systems.split.secure_records import SPLIT_PREPARATION, MiddlePrepareRequest

    provider, model = provider_of(options), options.model or shipped("private")
    drafts, new, tokens = _draft_length(options), options.max_new_tokens, options.prompt_tokens
    check_output(options.json)
    disk_bytes = megabytes(options, "disk")
    directory = (options.draft_model or shipped("public")) if drafts else model
    tokenizer = Tokenizer.load(directory)
    if tokens is None:
        tokens = len(_encoded(options.prompt, tokenizer))
    steps = likely_steps(new, drafts) if options.steps is None else options.steps
    request = _request(MiddlePrepareRequest, options, model, tokens, drafts, steps=steps)
    with closing(Stages()) as screen:
        result = prepare(
            request, tokenizer, provider, screen.on_event, disk_bytes, program=SPLIT_PREPARATION
        ).to_json()
    write_json(options.json, result)
    show_table(material_table(result))


def _encoded(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt, with those that are put before any text: none are public."""
    from spu_llm.api.texts import encoded

    public, own = encoded("", prompt, tokenizer)
    return [*public, *own]


def _request(
    kind: type[R],
    options: argparse.Namespace,
    model: Path,
    prompt_tokens: int,
    drafts: int,
    **more: Any,
) -> R:
    """Return the command's request. InputError when no split of the client's model is asked for."""
    from models.hf import load_model
    from models.split import ends_digest
    from spu_llm.app.split_options import split_of

    config, params = load_model(model)
    split = split_of(options)
    split.check(config)
    request = kind(
        prompt_tokens,
        options.max_new_tokens,
        drafts,
        show_progress=options.show_progress,
        front=split.front,
        back=split.back,
        ends=ends_digest(params, split),
        **more,
    )
    request.check_options()
    return request


def _draft_length(options: argparse.Namespace) -> int:
    length = DRAFT_LENGTH if options.draft_length is None else options.draft_length
    return drafting.length_of(length, standard=options.standard)
