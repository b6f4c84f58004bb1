"""Prompts as they go out, to a vault or to any endpoint: the user's with its spans, and fake
prompts beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.hf import load_model
from models.scoring import Scorer
from models.tokenizer import Tokenizer
from spu_llm.api.defaults import shipped
from spu_llm.core.errors import InputError
from spu_llm.systems.confidential import published, spans, taggers
from spu_llm.systems.confidential.book import Book
from spu_llm.systems.confidential.infilling import Infilling
from spu_llm.systems.confidential.obfuscation import Limits, Public
from spu_llm.systems.confidential.spans import Prompt
from spu_llm.systems.watermark.endpoint import HttpSampler
from spu_llm.vault.told import digest_of


@dataclass(frozen=True)
class ObfuscationOptions:
    """How redacted spans are to be hidden among fake prompts."""

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

    def learned(self) -> list[str]:
        """Return what the engine learns of which prompt is the user's."""
        if not self.facts:
            return []
        words = f"{len(self.rows)} prompts, one of them the user's; {self.facts['says']}"
        return [words, "all text outside of <redacted> spans; how long each is, which are equal"]


@dataclass(frozen=True)
class AmongFakes:
    """Texts of prompts in the order in which all of them are to be sent."""

    prompts: list[str]
    own: int  # which of them is the user's
    learned: list[str]  # by whoever reads all of them
    facts: dict[str, Any]


def among_fakes(prompt: str, options: ObfuscationOptions = ObfuscationOptions()) -> AmongFakes:
    """Return a prompt with <redacted> spans among fakes, for any model. What is sent must not
    depend on which one is the user's: send all, in this order, with the same settings.

    InputError where nothing is redacted, or nothing may be sent.
    """
    words = Tokenizer.load(options.draft_model or shipped("public"))
    marked = marked_prompt(prompt, options, words)
    if not marked.targets:
        raise InputError(
            "nothing in the prompt is <redacted>, so all of it would be read; mark what to hide, "
            "or give --redact"
        )
    out = outgoing(marked, options, words)
    prompts = [words.decode(row) for row in out.rows]
    if len(set(prompts)) < len(prompts) or prompts[out.own] != marked.marked.text:
        raise InputError("fakes are no texts of their own; give another --draft-model")
    return AmongFakes(prompts, out.own, out.learned(), out.facts)


def answered(
    among: AmongFakes,
    url: str,
    model: str,
    max_new_tokens: int,
    temperature: float,
    on_answer: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Return what the completion endpoint at `url` (.../v1/completions) says to each prompt, asked
    one after another. on_answer: gets how many are answered. PeerError when the endpoint does not;
    what was sent until then goes out again only with the same fakes where options had `secrets`.
    """
    with closing(HttpSampler(url, model, temperature)) as endpoint:
        texts = []
        for prompt in among.prompts:
            (drawn,) = endpoint.sample(prompt, 1, max_new_tokens)
            assert isinstance(drawn.content, str)
            texts.append(drawn.content)
            on_answer(len(texts))
    return texts


def marked_prompt(text: str, options: ObfuscationOptions, tokenizer: Tokenizer) -> Prompt:
    """Return the prompt with its spans; InputError where they cannot be read."""
    if options.redact is not None:
        marked = spans.tagged(text, taggers.TAGGERS[options.redact])
        if not marked.redacted:
            raise InputError("--redact finds nothing in this prompt; mark it with <redacted>")
    else:
        marked = spans.parse(text)
    return spans.tokenised(marked, tokenizer)


def outgoing(prompt: Prompt, options: ObfuscationOptions, tokenizer: Tokenizer) -> Outgoing:
    """Return what to send for a prompt. InputError where nothing may be sent."""
    options.check()
    as_published = options.as_published is not None
    public = prompt.public if as_published else prompt.leading
    if not prompt.targets:
        return Outgoing([prompt.tokens], 0, public, [], {})
    directory = options.draft_model or shipped("public")
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
        says += "; repeats are not accounted (--secrets)"
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
