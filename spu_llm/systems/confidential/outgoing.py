"""Prompts as they go out: the user's with its spans, and fake prompts beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.digest import digest_of
from models.hf import load_model
from models.scoring import Scorer
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.systems.confidential import published, spans, taggers
from spu_llm.systems.confidential.book import Book
from spu_llm.systems.confidential.infilling import Infilling
from spu_llm.systems.confidential.obfuscation import Limits, Public
from spu_llm.systems.confidential.spans import Prompt

# What whoever asks again after a failure should know.
WITHOUT_SECRETS = (
    "without --secrets other fakes go out when it is asked again, and both sets together tell the "
    "prompt"
)


@dataclass(frozen=True)
class ObfuscationOptions:
    """The settings of hiding redacted spans among fake prompts."""

    redact: str | None = None  # what finds them in a prompt without tags: "patterns", "presidio"
    fakes: int = 8  # fake prompts at most
    min_fakes: int = 4  # send nothing with fewer
    eta: float = 0.5  # how even fakes are
    secrets: Path | None = None  # folder that keeps account of what was redacted before
    draft_model: Path | None = None  # directory of the public model that makes fakes; the shipped
    as_published: str | None = None  # "printed", "program": the paper's fakes; broken, for study
    epsilon: float = 1 / 32  # with `as_published`

    def check(self) -> None:
        """Raise InputError for an epsilon that is none."""
        if not 0 < self.epsilon < 1:
            raise InputError(f"--epsilon must be between 0 and 1, found {self.epsilon:g}")


@dataclass(frozen=True)
class Outgoing:
    """Prompts that go out together."""

    rows: list[list[int]]  # their tokens
    own: int  # which of them is the user's
    public: list[int]  # positions that the engine may compute on by itself
    compact: list[int]  # positions that fakes have for themselves, where they share the others
    facts: dict[str, Any]  # of the obfuscation, for people; empty without any


def told_of(prompts: int, facts: Mapping[str, Any]) -> list[str]:
    """Return what whoever reads so many prompts learns of which one is the user's; facts: of
    `Outgoing`.
    """
    if not facts:
        return []
    words = f"{prompts} prompts, one of them the user's; {facts['says']}"
    return [words, "all text outside of <redacted> spans; how long each is, which are equal"]


def marked_prompt(text: str, options: ObfuscationOptions, tokenizer: Tokenizer) -> Prompt:
    """Return the prompt with its spans; InputError where they cannot be read."""
    if options.redact is not None:
        marked = spans.tagged(text, taggers.TAGGERS[options.redact])
        if not marked.redacted:
            raise InputError("--redact finds nothing in this prompt; mark it with <redacted>")
    else:
        marked = spans.parse(text)
    return spans.tokenised(marked, tokenizer)


def outgoing(
    prompt: Prompt, options: ObfuscationOptions, tokenizer: Tokenizer, public_model: Path
) -> Outgoing:
    """Return what to send for a prompt, by a public model in a directory where there is none in the
    options. InputError where nothing may be sent.
    """
    options.check()
    as_published = options.as_published is not None
    public = prompt.public if as_published else prompt.leading
    if not prompt.targets:
        return Outgoing([prompt.tokens], 0, public, [], {})
    directory = options.draft_model or public_model
    if Tokenizer.load(directory).digest != tokenizer.digest:
        raise InputError(f"{directory} has another tokenizer than the model; see --draft-model")
    config, params = load_model(directory)
    infilling = Infilling.of(tokenizer)
    # One more for what the model reads before a prompt that begins with a span.
    room = infilling.room(len(prompt.tokens)) if as_published else len(prompt.tokens) + 1
    if room > config.context:
        raise InputError(
            f"to make fakes of {len(prompt.tokens)} tokens the public model reads {room}, and it "
            f"reads {config.context} at most; shorten the prompt, or give another --draft-model"
        )
    known = Public(Scorer(config, params, room), tokenizer, digest_of([params]), infilling)
    if as_published:
        return _as_published(options, known, prompt, public)
    return _repaired(options, known, prompt, public)


def _repaired(
    options: ObfuscationOptions, known: Public, prompt: Prompt, public: list[int]
) -> Outgoing:
    limits = Limits(options.fakes, options.min_fakes, options.eta)
    rows, own, most = Book(options.secrets).rows(known, prompt, limits)
    says = (
        f"a guess reaches at most {most:.3f}, if prompts are distributed as the public model says"
    )
    if options.secrets is None:
        says += "; repeats are not accounted for: there is no folder of --secrets"
    facts = {"fakes": len(rows) - 1, "eta": options.eta, "bound": most, "says": says}
    return Outgoing([row.tolist() for row in rows], own, public, [], facts)


def _as_published(
    options: ObfuscationOptions, known: Public, prompt: Prompt, public: list[int]
) -> Outgoing:
    assert options.as_published is not None
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
