"""Prompts with a secret, to attack: from held-out text, and drawn by the public model itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.hf import load_model
from models.scoring import Scorer
from models.tokenizer import Tokenizer
from models.training.snippets import SHIPPED, read_snippets
from spu_llm.api.defaults import shipped
from spu_llm.core.errors import InputError
from spu_llm.systems.confidential.infilling import Infilling
from spu_llm.systems.confidential.obfuscation import Public
from spu_llm.systems.confidential.spans import Marked, Prompt, Span, tokenised

BEFORE, AFTER = 16, 6  # tokens around a secret
FEW = 2  # after one that is drawn: more would determine it
LONGEST = 3  # tokens of a secret
_WORD = re.compile(r"[A-Za-z_]{3,}")


@dataclass(frozen=True)
class Setting:
    """Models and held-out text; source: of the draws."""

    public: Public
    owner: Scorer
    texts: list[list[int]]
    source: np.random.Generator


def held_out(tokenizer: Tokenizer) -> list[list[int]]:
    """Return excerpts of held-out text, in tokens."""
    return [tokenizer.encode(s.text) for s in read_snippets(SHIPPED / "held_out.jsonl")]


def setting_of(model: Path, seed: int, public: Path | None = None) -> Setting:
    """Return the setting with the owner's model in this directory, and a public model (None: the
    shipped one). InputError when they have other tokenizers.
    """
    tokenizer, directory = Tokenizer.load(model), public or shipped("public")
    if Tokenizer.load(directory).digest != tokenizer.digest:
        raise InputError(
            f"{directory} has another tokenizer than {model}; give a --public model that has its"
        )
    length, infilling = BEFORE + AFTER + LONGEST, Infilling.of(tokenizer)
    scorer = Scorer(*load_model(directory), infilling.room(length))
    return Setting(
        Public(scorer, tokenizer, infilling=infilling),
        Scorer(*load_model(model), 2 * length),
        [text for text in held_out(tokenizer) if len(text) > 2 * length],
        np.random.default_rng(seed),
    )


def of_text(setting: Setting) -> Prompt | None:
    """Draw a piece of held-out text, a word of it the secret; None where the draw has none."""
    text = setting.texts[setting.source.integers(len(setting.texts))]
    at = int(setting.source.integers(len(text) - BEFORE - LONGEST - AFTER))
    piece = setting.public.tokenizer.decode(text[at : at + BEFORE + LONGEST + AFTER])
    start = len(setting.public.tokenizer.decode(text[at : at + BEFORE]))
    word = _WORD.search(piece, start)
    if word is None or "\ufffd" in piece:
        return None
    span = [Span(*word.span())]
    return _fitting(setting, Marked(piece, span, span))


def of_distribution(setting: Setting) -> Prompt | None:
    """Draw the beginning of held-out text, and from the public model a secret and what follows it:
    the distribution that the bound is about. None where the draw is not usable as text.
    """
    public, source = setting.public, setting.source
    text = setting.texts[source.integers(len(setting.texts))]
    at = int(source.integers(len(text) - BEFORE))
    row, length = text[at : at + BEFORE], int(source.integers(1, LONGEST + 1))
    scored = public.scorer.begin(row)
    for _ in range(length + FEW):
        chances = np.exp(scored.next[0].astype(np.float64))
        token = source.choice(len(chances), p=chances / chances.sum())
        scored = public.scorer.extended(scored, np.zeros(1, int), np.array([[token]]))
    row = scored.tokens[0].tolist()
    decode = public.tokenizer.decode
    start, stop = (len(decode(row[:i])) for i in (BEFORE, BEFORE + length))
    if "\ufffd" in decode(row) or public.tokenizer.encode(decode(row)) != row or start == stop:
        return None
    return _fitting(setting, Marked(decode(row), [Span(start, stop)], [Span(start, stop)]))


def of_name(setting: Setting) -> Prompt | None:
    """Draw a piece of held-out text with a word that is there twice, both times a secret; None
    where the draw has none.
    """
    text = setting.texts[setting.source.integers(len(setting.texts))]
    at = int(setting.source.integers(len(text) - BEFORE - AFTER))
    piece = setting.public.tokenizer.decode(text[at : at + BEFORE + LONGEST + AFTER])
    places: dict[str, list[Span]] = {}
    for word in _WORD.finditer(piece):
        places.setdefault(word[0], []).append(Span(*word.span()))
    twice = [pair for pair in places.values() if len(pair) == 2]
    if not twice or "\ufffd" in piece:
        return None
    return _fitting(setting, Marked(piece, twice[0], twice[0]))


def _fitting(setting: Setting, marked: Marked) -> Prompt | None:
    try:
        prompt = tokenised(marked, setting.public.tokenizer)
    except InputError:
        return None
    longest = max(len(target) for target in prompt.targets)
    return prompt if longest <= LONGEST and prompt.targets[0].start else None
