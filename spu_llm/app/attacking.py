"""`spu-llm attack`: what the model's owner finds out in each mode, on real runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from spu_llm.api.defaults import shipped
from spu_llm.app.attack_request import AttackConfig
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import show
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from spu_llm.systems.outcome import AttackOutcome

# Vault mode; prompt obfuscation in it as published, and repaired; both parties on shares; the modes
# of split models.
SPLIT_MODES = ("plain", "noir", "mpc")
MODES = ("vault", "published", "repaired", "two-party", *SPLIT_MODES)
PROMPTS = 20
MAX_PROMPTS = 10_000
_RUNS, _SETS = "spu_llm.app.attack_runs:", "spu_llm.app.attack_sets:"
_SPLIT = "spu_llm.app.attack_split:"


@dataclass(frozen=True)
class Attack:
    """`runs`: by mode, the place of a function of `AttackConfig` that yields outcomes, which is
    imported when it is chosen.
    """

    about: str
    runs: dict[str, str]


ATTACKS = {
    "layer0": Attack(
        "the first layer's keys and values follow from token and position alone: solves the "
        "linear equations of its answers for the prompt's tokens",
        {
            "vault": _RUNS + "layer0_vault",
            "published": _SETS + "layer0_published",
            "repaired": _SETS + "layer0_repaired",
            "two-party": _RUNS + "layer0_two_party",
        },
    ),
    "recompute": Attack(
        "recomputes what each of some candidate prompts would have shown, and takes the nearest",
        {"vault": _RUNS + "recompute_vault", "two-party": _RUNS + "recompute_two_party"},
    ),
    "length": Attack(
        "tells candidate prompts apart by their lengths, and when their texts end",
        {
            "vault": _RUNS + "length_vault",
            "published": _SETS + "length_published",
            "repaired": _SETS + "length_repaired",
            "two-party": _RUNS + "length_two_party",
        },
    ),
    "posterior": Attack(
        "takes the fake prompts for less likely than the user's, by what models say",
        {"published": _SETS + "posterior_published", "repaired": _SETS + "posterior_repaired"},
    ),
    "rank": Attack(
        "makes fakes of each prompt that came: of the user's they are those beside it",
        {"published": _SETS + "rank_published", "repaired": _SETS + "rank_repaired"},
    ),
    "compact": Attack(
        "finds the only prompt whose keys and values are those of a forward of its tokens",
        {"published": _SETS + "compact_published", "repaired": _SETS + "compact_repaired"},
    ),
    "incoherent": Attack(
        "finds the prompt whose secrets go together",
        {"published": _SETS + "incoherent_published", "repaired": _SETS + "incoherent_repaired"},
    ),
    "intersection": Attack(
        "looks what the sets of a prompt that is sent again have in common",
        {
            "published": _SETS + "intersection_published",
            "repaired": _SETS + "intersection_repaired",
        },
    ),
    "noir": Attack(
        "on split models, what their host reads off rows and gradients: all attacks of "
        "spu_llm/systems/split/attacks, or those of --attack",
        {"plain": _SPLIT + "plain", "noir": _SPLIT + "noir", "mpc": _SPLIT + "mpc"},
    ),
}


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
    split = parser.add_argument_group("of split models")
    split.add_argument(
        "--attack", default="", metavar="NAME,...", help="a1 to a6, a8 to a12 (default: all)"
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


def place_of(name: str, mode: str) -> str:
    """Return the place of the function that runs this attack; InputError when there is none."""
    if name not in ATTACKS:
        raise InputError(f"there is no attack {name!r}; choose from {', '.join(ATTACKS)}")
    if mode not in MODES:
        raise InputError(f"--mode must be one of {', '.join(MODES)}, found {mode!r}")
    if mode not in ATTACKS[name].runs:
        others = ", ".join(other for other, attack in ATTACKS.items() if mode in attack.runs)
        raise InputError(
            f"{name} is an attack on {', '.join(ATTACKS[name].runs)}; on {mode} there is "
            f"{others or 'none'}"
        )
    return ATTACKS[name].runs[mode]


def _of_split(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of split models, as fields of `AttackConfig`; InputError for wrong
    ones.
    """
    codebook = bool(options.mechanism) or options.epsilon is not None
    given = options.attack or codebook or options.secrets
    if options.mode not in SPLIT_MODES:
        if given:
            raise InputError(
                "--attack, --mechanism, --epsilon and --secrets are of: spu-llm attack noir"
            )
        return {}
    if options.mode != "noir" and (codebook or options.secrets):
        raise InputError(
            f"--mechanism, --epsilon and --secrets are of --mode noir, not {options.mode}"
        )
    if options.secrets and codebook:
        raise InputError("--secrets have a codebook; leave --mechanism and --epsilon out")
    from spu_llm.app.attack_split import check_attacks, check_codebook
    from spu_llm.app.split_options import split_of

    names = tuple(name for name in options.attack.split(",") if name)
    check_attacks(names)
    check_codebook(options.mechanism, options.epsilon)
    return {
        "attacks": names,
        "split": tuple(split_of(options)),
        "mechanism": options.mechanism,
        "epsilon": options.epsilon,
        "secrets": options.secrets,
    }


def _run(options: argparse.Namespace) -> None:
    check_output(options.json)
    place = place_of(options.name, options.mode)
    if not 2 <= options.prompts <= MAX_PROMPTS:
        raise InputError(f"--prompts must be 2 to {MAX_PROMPTS}, found {options.prompts}")
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
        **of_split,
    )
    run: Callable[[AttackConfig], Iterator[AttackOutcome]] = resolve_name(place)
    outcomes = []
    try:
        for outcome in run(wanted):
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
    config |= {
        name: value if isinstance(value, float | tuple) else str(value)
        for name, value in of_split.items()
        if value is not None
    }
    result = {"outcomes": shown, "machine": asdict(machine()), "config": config}
    write_json(options.json, result)
