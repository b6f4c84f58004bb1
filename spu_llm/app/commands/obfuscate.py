"""`spu-llm obfuscate`: a prompt among fake ones, for any endpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from spu_llm.app import span_options
from spu_llm.app.options import add_prompt, given
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import Generated, say, show, tell
from spu_llm.core.errors import InputError

_PROMPT = "Written by <redacted>Guido</redacted> in 1999."
_ABOUT = (
    "What is <redacted> in a prompt goes out among fakes that a public model finds as likely "
    "(Gim, Li, Zhong: Confidential Prompting, repaired). Whoever reads all prompts guesses which "
    "one is yours with a probability that is bounded if prompts are distributed as that model "
    "says; all other text is theirs to read. Without --endpoint the prompts go to stdout, as "
    "lines of JSON; send all of them, in this order and with the same settings."
)
_PUBLISHED = (
    "make fakes as the paper prints it, or as its authors' program does: broken, for study "
    "('spu-llm attack')"
)


def add_command(commands: Any) -> None:
    obfuscate = commands.add_parser(
        "obfuscate",
        help="hide what is <redacted> in a prompt among fake prompts, for any endpoint",
        description=_ABOUT,
    )
    add_prompt(obfuscate, _PROMPT)
    obfuscate.add_argument(
        "--endpoint",
        metavar="URL",
        help="ask this completion endpoint, .../v1/completions, with all of them, and print the "
        "answer to yours; SPU_LLM_API_KEY may hold its key",
    )
    obfuscate.add_argument("--endpoint-model", default="", metavar="NAME")
    obfuscate.add_argument(
        "--max-new-tokens", type=int, default=32, metavar="N", help="default: %(default)s"
    )
    obfuscate.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="of the endpoint (default: %(default)s)",
    )
    span_options.add_options(obfuscate)
    span_options.add_as_published(obfuscate, _PUBLISHED)
    obfuscate.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all prompts, which one is yours, and answers as JSON",
    )
    obfuscate.add_argument("--debug", action="store_true", help="show a traceback on errors")
    obfuscate.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    """Print the prompts, or the answer to the user's; what the endpoint learns to stderr."""
    from spu_llm.api.obfuscation import ObfuscationOptions, among_fakes, answered

    check_output(options.json)
    if options.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be 1 or more, found {options.max_new_tokens}")
    if not 0 <= options.temperature <= 2:
        raise InputError(f"--temperature must be 0 to 2, found {options.temperature:g}")
    say("finding fakes")
    made = among_fakes(options.prompt, given(ObfuscationOptions, options))
    answers: list[str] = []
    if options.endpoint is None:
        show(*(json.dumps({"prompt": prompt}) for prompt in made.prompts))
        tell(f"prompt {made.own + 1} of {len(made.prompts)} is yours")
    else:
        answers = answered(
            made,
            options.endpoint,
            options.endpoint_model,
            options.max_new_tokens,
            options.temperature,
            lambda done: say(f"{done} of {len(made.prompts)} prompts are answered"),
        )
        generated = Generated()
        generated.write(answers[made.own])
        generated.end_line()
    tell("whoever reads the prompts learns:", *(f"  - {fact}" for fact in made.learned))
    own = {"own": made.own, "learned": made.learned, **made.facts}
    write_json(options.json, {"prompts": made.prompts, "answers": answers, **own})
