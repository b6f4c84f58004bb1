"""`spu-llm attack`: what the model's owner finds out in each mode, on real runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spu_llm.api.defaults import shipped
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import show
from spu_llm.attacks.registry import (
    ATTACKS,
    MAX_PROMPTS,
    SPLIT_MODES,
    attacks_on_split,
    place_of,
    run,
)
from spu_llm.attacks.request import AttackConfig
from spu_llm.core.errors import InputError

PROMPTS = 20


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "attack",
        help="what a curious model owner finds out about prompts",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Runs an attack of the model's owner on real runs on this machine, with "
        "held-out text as prompts,\nand prints how often it succeeds, with 95 % intervals, beside "
        "what guessing gives.",
        epilog="attacks:\n"
        + "\n".join(
            f"  {name:<12} {attack.about}\n{'':<15}(--mode {', '.join(attack.runs)})"
            for name, attack in ATTACKS.items()
        ),
    )
    parser.add_argument("name", metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument(
        "--mode",
        required=True,
        metavar="MODE",
        help="vault: vault mode as published; published, repaired: with prompt "
        "obfuscation in it; two-party: generate, on shares; of split models "
        "plain, noir (a secret codebook), mpc (the middle on shares)",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=PROMPTS,
        metavar="N",
        help="default: %(default)s; on shares each takes half a minute",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of the choice of prompts and of sampling (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the owner's model directory (default: the shipped one)",
    )
    parser.add_argument(
        "--public",
        type=Path,
        metavar="DIR",
        help="in the modes published and repaired the public model that makes fakes, with the "
        "tokenizer of --model (default: the shipped one)",
    )
    split = parser.add_argument_group("of split models")
    split.add_argument(
        "--attack",
        default="",
        metavar="NAME,...",
        help="a1 to a6, a8 to a12, a1-codebooks (default: all)",
    )
    split.add_argument(
        "--split",
        default="1,1",
        metavar="F,B",
        help="blocks of the client's front and back (default: %(default)s)",
    )
    split.add_argument(
        "--mechanism",
        metavar="NAME",
        help="of the codebook in mode noir: arr, arr-renormalised, grr, exponential "
        "(default: a sound one)",
    )
    split.add_argument(
        "--epsilon",
        type=float,
        metavar="E",
        help="of the codebook, for all features together (default: 13 / 4096 each)",
    )
    split.add_argument(
        "--secrets",
        type=Path,
        metavar="DIR",
        help="in mode noir the codebook and the ends that spu-llm split tune made "
        "(default: a drawn codebook, no tuning)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes as JSON")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=_run)


def _of_split(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of split models, as fields of `AttackConfig`; InputError for wrong
    ones.
    """
    codebook = {name: getattr(options, name) for name in ("mechanism", "epsilon", "secrets")}
    names = attacks_on_split(options.mode, options.attack, **codebook)
    if options.mode not in SPLIT_MODES:
        return {}
    from models.split import Split

    return {"attacks": names, "split": tuple(Split.parse(options.split)), **codebook}


def _run(options: argparse.Namespace) -> None:
    check_output(options.json)
    place_of(options.name, options.mode)
    if not 2 <= options.prompts <= MAX_PROMPTS:
        raise InputError(f"--prompts must be 2 to {MAX_PROMPTS}, found {options.prompts}")
    if options.public is not None and options.mode not in ("published", "repaired"):
        raise InputError("--public is of the modes published and repaired")
    if options.seed < 0:
        raise InputError(f"--seed must be 0 or more, found {options.seed}")
    of_split = _of_split(options)
    from spu_llm.app.progress import Progress
    from spu_llm.core.machine import machine

    progress = Progress()
    wanted = AttackConfig(
        options.model or shipped("private"),
        options.prompts,
        options.seed,
        progress.stage,
        public=options.public,
        **of_split,
    )
    outcomes = []
    try:
        for outcome in run(options.name, options.mode, wanted):
            progress.pause()
            show(outcome.line())
            outcomes.append(outcome)
    finally:
        progress.close()
    shown = [
        {
            **asdict(o),
            "rate": o.rate,
            "interval": o.interval,
            "by_luck": o.by_luck,
            "at_chance": o.at_chance,
        }
        for o in outcomes
    ]
    config = {"model": wanted.model.name, "prompts": wanted.prompts, "seed": wanted.seed}
    if wanted.public is not None:
        config["public"] = wanted.public.name
    config |= {
        name: value if isinstance(value, float | tuple) else str(value)
        for name, value in of_split.items()
        if value is not None
    }
    result = {"outcomes": shown, "machine": asdict(machine()), "config": config}
    write_json(options.json, result)
