"""The options `--watermark KEYFILE` of `generate` and `demo`, and `--mark KEYFILE` of a provider
(`spu_llm.api.marking`).
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watermark",
        type=Path,
        action="append",
        default=[],
        metavar="KEYFILE",
        help="mark the text under a key of watermark keygen (with --candidates; "
        "may be given again: two keys choose one inside the other, among 4, 9 or "
        "16) or watermark keygen --race (with --verify race), which watermark "
        "detect then finds; KEYFILE.history keeps what was used of it",
    )


def add_candidates(parser: argparse.ArgumentParser) -> None:
    """Add the option `--candidates`, also for a completion to come."""
    parser.add_argument(
        "--candidates",
        type=int,
        default=1,
        metavar="M",
        help="a step verifies 2 to 16 continuations, each with drafts of its own: with --verify "
        "race or --temperature 0 chains of drafts that begin apart, of which the longest stays; "
        "with --watermark the key chooses one (M of all keys together); you see all M, the "
        "provider learns M, not which",
    )


def add_provider_option(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument(
        "--mark",
        type=Path,
        metavar="KEYFILE",
        help="mark every text under a key of watermark keygen --provider, which "
        "clients ask for with --verify marked and --temperature 0.5 or more; "
        f"{words}KEYFILE.sessions keeps what watermark detect needs",
    )
