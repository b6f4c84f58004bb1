"""Options of how what is <redacted> in a prompt is hidden among fake prompts
(`spu_llm.api.obfuscation.ObfuscationOptions`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAKES, FEWEST, ETA, EPSILON = 8, 4, 0.5, 1 / 32
VARIANTS = ("printed", "program")


def add_options(group: Any) -> None:
    """Add the options of fakes that keep their bound."""
    group.add_argument(
        "--redact",
        choices=("patterns", "presidio"),
        help="find what to redact in a prompt without tags",
    )
    group.add_argument(
        "--fakes",
        type=int,
        default=FAKES,
        metavar="N",
        help="fake prompts at most (default: %(default)s)",
    )
    group.add_argument(
        "--min-fakes",
        type=int,
        default=FEWEST,
        metavar="N",
        help="send nothing with fewer (default: %(default)s)",
    )
    group.add_argument(
        "--eta",
        type=float,
        default=ETA,
        metavar="E",
        help="how even fakes are: among N of them a guess reaches 1 / (1 + N e^-E) "
        "at most, if prompts are distributed as the public model says, and this one "
        "is tried once (default: %(default)s)",
    )
    group.add_argument(
        "--secrets",
        type=Path,
        metavar="DIR",
        help="a folder that keeps account of what was redacted before; without "
        "one, repeating a secret gives it away by and by",
    )
    group.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR",
        help="public model that makes fakes (default: the shipped one)",
    )


def add_as_published(group: Any, words: str) -> None:
    """Add the options of the paper's fakes; `words` say what they are."""
    group.add_argument("--as-published", nargs="?", const="printed", choices=VARIANTS, help=words)
    group.add_argument(
        "--epsilon",
        type=float,
        default=EPSILON,
        metavar="E",
        help="with --as-published (default: %(default)s)",
    )
