"""The attacks of a curious model owner: by name, on which modes each is run, and by what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from spu_llm.attacks.request import AttackConfig
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from spu_llm.systems.outcome import AttackOutcome

# Vault mode; prompt obfuscation in it as published, and repaired; both parties on shares; the modes
# of split models.
SPLIT_MODES = ("plain", "noir", "mpc")
MODES = ("vault", "published", "repaired", "two-party", *SPLIT_MODES)
MAX_PROMPTS = 10_000
_RUNS, _SETS = "spu_llm.attacks.runs:", "spu_llm.attacks.sets:"
_SPLIT = "spu_llm.attacks.split:"


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


def attacks_on_split(
    mode: str, attacks: str, mechanism: str | None, epsilon: float | None, secrets: Path | None
) -> tuple[str, ...]:
    """Return the names in `attacks`, a list with commas: of attacks on split models. InputError for
    names that there are not, and for settings of a codebook that the mode does not have.
    """
    codebook = bool(mechanism) or epsilon is not None
    if mode not in SPLIT_MODES:
        if attacks or codebook or secrets:
            raise InputError(
                "--attack, --mechanism, --epsilon and --secrets are of: spu-llm attack noir"
            )
        return ()
    if mode != "noir" and (codebook or secrets):
        raise InputError(f"--mechanism, --epsilon and --secrets are of --mode noir, not {mode}")
    if secrets and codebook:
        raise InputError("--secrets have a codebook; leave --mechanism and --epsilon out")
    from spu_llm.attacks.split import check_attacks, check_codebook

    names = tuple(name for name in attacks.split(",") if name)
    check_attacks(names)
    check_codebook(mechanism, epsilon)
    return names


def run(name: str, mode: str, wanted: AttackConfig) -> Iterator[AttackOutcome]:
    """Yield what attack `name` finds out in a mode, as it is known. InputError as of `place_of`."""
    yield from resolve_name(place_of(name, mode))(wanted)
