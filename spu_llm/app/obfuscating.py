"""Options of `vault generate` about spans, and the prompts that go out for them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.api.defaults import shipped
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer
    from spu_llm.systems.confidential.obfuscation import Public
    from spu_llm.systems.confidential.spans import Prompt

FAKES, FEWEST, ETA, EPSILON = 8, 4, 0.5, 1 / 32
_PUBLISHED = ("printed", "program")


@dataclass(frozen=True)
class Outgoing:
    """Prompts that go out together; number `own` is the user's. public and compact: positions."""

    rows: list[list[int]]
    own: int
    public: list[int]
    compact: list[int]
    facts: dict[str, Any]  # of the obfuscation, for people; empty without any

    def learned(self) -> list[str]:
        """Return what the engine learns of which prompt is the user's."""
        if not self.facts:
            return []
        words = f"{len(self.rows)} prompts, one of them the user's; {self.facts['says']}"
        return [words, "all text outside of <redacted> spans; how long each is, which are equal"]


def add_options(parser: Any) -> None:
    group = parser.add_argument_group(
        "spans",
        "A prompt may mark what stays with the vault, <confidential>...</confidential> (by default "
        "all of it), and in that what not even the engine's computing is to give away, "
        "<redacted>...</redacted>: fake prompts go out beside it, with other text there.",
    )
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
    group.add_argument(
        "--as-published",
        nargs="?",
        const="printed",
        choices=_PUBLISHED,
        help="make fakes as the paper prints it, or as its authors' program does, "
        "share their keys and values, and give the engine those of all public "
        "text: broken, for study ('spu-llm attack')",
    )
    group.add_argument(
        "--epsilon",
        type=float,
        default=EPSILON,
        metavar="E",
        help="with --as-published (default: %(default)s)",
    )


def marked_prompt(options: argparse.Namespace, tokenizer: Tokenizer) -> Prompt:
    """Return the prompt with its spans; InputError where these cannot be read."""
    from spu_llm.systems.confidential import spans, taggers

    if options.redact is not None:
        marked = spans.tagged(options.prompt, taggers.TAGGERS[options.redact])
        if not marked.redacted:
            raise InputError("--redact finds nothing in this prompt; mark it with <redacted>")
    else:
        marked = spans.parse(options.prompt)
    return spans.tokenised(marked, tokenizer)


def outgoing(options: argparse.Namespace, prompt: Prompt, tokenizer: Tokenizer) -> Outgoing:
    """Return what to send for a prompt. InputError where nothing may be sent."""
    published = options.as_published is not None
    public = prompt.public if published else prompt.leading
    if not prompt.targets:
        return Outgoing([prompt.tokens], 0, public, [], {})
    from models.hf import load_model
    from models.scoring import Scorer
    from models.tokenizer import Tokenizer
    from spu_llm.systems.confidential.obfuscation import Public
    from spu_llm.vault.told import digest_of

    directory = options.draft_model or shipped("public")
    if Tokenizer.load(directory).digest != tokenizer.digest:
        raise InputError(f"{directory} has another tokenizer than the model; see --draft-model")
    # One more for what the model reads before a prompt that begins with a span.
    config, params = load_model(directory)
    scorer = Scorer(config, params, len(prompt.tokens) + 1)
    known = Public(scorer, tokenizer, digest_of([params]))
    if published:
        return _as_published(options, known, prompt, public)
    return _repaired(options, known, prompt, public)


def _repaired(
    options: argparse.Namespace, known: Public, prompt: Prompt, public: list[int]
) -> Outgoing:
    from spu_llm.systems.confidential.book import Book
    from spu_llm.systems.confidential.obfuscation import Limits

    limits = Limits(options.fakes, options.min_fakes, options.eta)
    rows, own, most = Book(options.secrets).rows(known, prompt, limits)
    says = (
        f"a guess reaches at most {most:.3f}, if prompts are distributed as the public model says"
    )
    if options.secrets is None:
        says += "; repeats are not accounted (--secrets)"
    facts = {"fakes": len(rows) - 1, "eta": options.eta, "bound": most, "says": says}
    return Outgoing([row.tolist() for row in rows], own, public, [], facts)


def _as_published(
    options: argparse.Namespace, known: Public, prompt: Prompt, public: list[int]
) -> Outgoing:
    from spu_llm.systems.confidential import published

    if not 0 < options.epsilon < 1:
        raise InputError(f"--epsilon must be between 0 and 1, found {options.epsilon:g}")
    rows, own = published.among_fakes(
        options.as_published, known, prompt, options.epsilon, options.fakes, options.min_fakes
    )
    fakes = len(rows) - 1
    bound = published.claimed_bound(options.epsilon, len(prompt.targets), fakes)
    says = f"as published, where a guess is claimed to reach {bound:.3f} at most, which is wrong"
    compact = prompt.hidden
    if len({len(row) for row in rows}) > 1:  # nothing lines up
        compact, public = [], prompt.leading
    elif len(compact) == len(prompt.tokens):  # nothing is shared
        compact = []
    facts = {"fakes": fakes, "epsilon": options.epsilon, "claimed": bound, "says": says}
    return Outgoing(rows, own, public, compact, facts)
