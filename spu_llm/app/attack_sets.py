"""Attacks on prompt obfuscation run: real text with a secret in it, the prompts that go out for it,
and which of them an engine takes for the user's.

The engine has read all of them, as `layer0` and `recompute` show that it can; what it goes by here
is how they were chosen (`spu_llm.systems.confidential.attacks.sets`). Only where it goes by its
vault's answers is a vault run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from models.family import family_of
from models.hf import load_model
from models.scoring import Scorer
from models.tokenizer import Tokenizer
from models.training.snippets import SHIPPED, read_snippets
from spu_llm.app import attack_views
from spu_llm.app.attacking import Wanted
from spu_llm.app.defaults import shipped
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.service.vault.user import Wish
from spu_llm.systems.confidential import published
from spu_llm.systems.confidential.attacks import recompute, sets
from spu_llm.systems.confidential.attacks.outcome import Outcome
from spu_llm.systems.confidential.attacks.sets import Sent
from spu_llm.systems.confidential.book import Book
from spu_llm.systems.confidential.obfuscation import Limits, Public, TooFewError, shuffled
from spu_llm.systems.confidential.spans import Marked, Prompt, Span, tokenised

LIMITS = Limits()
EPSILON = 1 / 8  # as published
BEFORE, AFTER = 16, 6  # tokens around a secret
LONGEST = 3  # tokens of a secret
REPEATS = 4  # of a prompt
_WORD = re.compile(r"[A-Za-z_]{3,}")
_TRIES = 40  # for each prompt that is asked for, until one has fakes


@dataclass(frozen=True)
class _Setting:
    public: Public
    owner: Scorer
    texts: list[list[int]]
    source: np.random.Generator


def _setting(wanted: Wanted) -> _Setting:
    tokenizer = Tokenizer.load(wanted.model)
    room = 2 * (BEFORE + AFTER + LONGEST)
    texts = [tokenizer.encode(s.text) for s in read_snippets(SHIPPED / "held_out.jsonl")]
    return _Setting(
        Public(Scorer(*load_model(shipped("public")), room), tokenizer),
        Scorer(*load_model(wanted.model), room),
        [text for text in texts if len(text) > room],
        np.random.default_rng(wanted.seed),
    )


# ---- prompts with a secret


def _of_text(setting: _Setting) -> Prompt | None:
    """A piece of held-out text, a word of it the secret; None where the draw has none."""
    text = setting.texts[setting.source.integers(len(setting.texts))]
    at = int(setting.source.integers(len(text) - BEFORE - LONGEST - AFTER))
    piece = setting.public.tokenizer.decode(text[at : at + BEFORE + LONGEST + AFTER])
    start = len(setting.public.tokenizer.decode(text[at : at + BEFORE]))
    word = _WORD.search(piece, start)
    if word is None or "\ufffd" in piece:
        return None
    span = [Span(*word.span())]
    return _fitting(setting, Marked(piece, span, span))


def _of_law(setting: _Setting) -> Prompt | None:
    """The beginning of held-out text; a secret and what follows it are drawn from the public model:
    the law that the bound is about.
    """
    public, source = setting.public, setting.source
    text = setting.texts[source.integers(len(setting.texts))]
    at = int(source.integers(len(text) - BEFORE))
    row, length = text[at : at + BEFORE], int(source.integers(1, LONGEST + 1))
    scored = public.scorer.begin(row)
    for _ in range(length + AFTER):
        chances = np.exp(scored.next[0].astype(np.float64))
        token = source.choice(len(chances), p=chances / chances.sum())
        scored = public.scorer.extended(scored, np.zeros(1, int), np.array([[token]]))
    row = scored.tokens[0].tolist()
    decode = public.tokenizer.decode
    start, stop = (len(decode(row[:i])) for i in (BEFORE, BEFORE + length))
    if "\ufffd" in decode(row) or public.tokenizer.encode(decode(row)) != row or start == stop:
        return None
    return _fitting(setting, Marked(decode(row), [Span(start, stop)], [Span(start, stop)]))


def _of_name(setting: _Setting) -> Prompt | None:
    """A piece of held-out text with a word that is there twice, both times a secret."""
    text = setting.texts[setting.source.integers(len(setting.texts))]
    at = int(setting.source.integers(len(text) - BEFORE - AFTER))
    piece = setting.public.tokenizer.decode(text[at : at + BEFORE + LONGEST + AFTER])
    places: dict[str, list[Span]] = {}
    for word in _WORD.finditer(piece):
        places.setdefault(word[0], []).append(Span(*word.span()))
    twice = [found for found in places.values() if len(found) == 2]
    if not twice or "\ufffd" in piece:
        return None
    return _fitting(setting, Marked(piece, twice[0], twice[0]))


def _fitting(setting: _Setting, marked: Marked) -> Prompt | None:
    try:
        prompt = tokenised(marked, setting.public.tokenizer)
    except InputError:
        return None
    longest = max(len(target) for target in prompt.targets)
    return prompt if longest <= LONGEST and prompt.targets[0].start else None


# ---- what goes out for them

Obfuscate = Callable[[_Setting, Prompt], Sent]


def _repaired(setting: _Setting, prompt: Prompt) -> Sent:
    rows, own = Book(None).rows(setting.public, prompt, LIMITS)
    return Sent(prompt, [row.tolist() for row in rows], own)


def _published(variant: str) -> Obfuscate:
    def obfuscate(setting: _Setting, prompt: Prompt) -> Sent:
        sample = published.sampler(
            variant, setting.public, prompt, EPSILON, LIMITS.fakes, Prg.from_os()
        )
        found = published.rows(prompt, sample)
        if len(found) - 1 < LIMITS.fewest:
            raise TooFewError(len(found) - 1, LIMITS.fewest)
        rows, own = shuffled(found, Prg.from_os())
        return Sent(prompt, rows, own)

    return obfuscate


def _sent(
    wanted: Wanted, setting: _Setting, draw: Callable[[_Setting], Prompt | None],
    obfuscate: Obfuscate,
) -> tuple[list[Sent], int]:  # fmt: skip
    """As many as are asked for, and how many prompts were refused for want of fakes."""
    found: list[Sent] = []
    refused = 0
    for _ in range(_TRIES * wanted.prompts):
        if len(found) == wanted.prompts:
            break
        prompt = draw(setting)
        if prompt is None:
            continue
        try:
            found.append(obfuscate(setting, prompt))
        except TooFewError:
            refused += 1
        if len(found) % 10 == 0:
            wanted.on_stage(f"prompt {len(found)} of {wanted.prompts}")
    if len(found) < wanted.prompts:
        raise InputError(f"only {len(found)} prompts have fakes; lower --prompts")
    return found, refused


def _outcome(
    attack: str, mode: str, what: str, sent: Sequence[Sent], successes: int, notes: str = ""
) -> Outcome:
    """Of one guess for each of these."""
    chance = float(np.mean([1 / len(s.rows) for s in sent]))
    fakes = [len(s.rows) - 1 for s in sent]
    spans = len(sent[0].shape.targets)
    bounds = [
        LIMITS.bound(n) if mode == "repaired" else published.claimed_bound(EPSILON, spans, n)
        for n in fakes
    ]
    return Outcome(
        attack, mode, what, len(sent), successes, chance, float(np.mean(bounds)), notes
    )


# ---- runs


def posterior_published(wanted: Wanted) -> Iterator[Outcome]:
    for variant in ("printed", "program"):
        yield from _posterior(wanted, "published", f", {variant}", _published(variant))


def posterior_repaired(wanted: Wanted) -> Iterator[Outcome]:
    yield from _posterior(wanted, "repaired", "", _repaired)


def _posterior(
    wanted: Wanted, mode: str, more: str, obfuscate: Obfuscate
) -> Iterator[Outcome]:
    for law, draw in (("the public model's law", _of_law), ("real text", _of_text)):
        setting = _setting(wanted)
        sent, refused = _sent(wanted, setting, draw, obfuscate)
        guesses = [sets.by_likelihood(setting.public, setting.owner, s) for s in sent]
        best, hits, tries = sets.best_of(guesses, [s.own for s in sent])
        yield _outcome(
            "posterior", mode, f"secrets of {law}{more}: {best}", sent[-tries:], hits,
            f"the best of {len(guesses[0])} guesses on another {len(sent) - tries} prompts; "
            f"{refused} prompts had too few fakes",
        )  # fmt: skip


def rank_published(wanted: Wanted) -> Iterator[Outcome]:
    setting = _setting(wanted)
    sent, _ = _sent(wanted, setting, _of_text, _published("printed"))
    hits = sum(
        sets.by_regeneration(setting.public, s, EPSILON, LIMITS.fakes) == s.own for s in sent
    )
    yield _outcome("rank", "published", "the row that gives the others, as printed", sent, hits)


def rank_repaired(wanted: Wanted) -> Iterator[Outcome]:
    setting = _setting(wanted)
    sent, _ = _sent(wanted, setting, _of_text, _repaired)
    hits = sum(sets.by_redrawing(setting.public, s, LIMITS) == s.own for s in sent)
    yield _outcome("rank", "repaired", "the row whose fakes come again", sent, hits)


def incoherent_published(wanted: Wanted) -> Iterator[Outcome]:
    yield from _incoherent(wanted, "published", _published("printed"))


def incoherent_repaired(wanted: Wanted) -> Iterator[Outcome]:
    yield from _incoherent(wanted, "repaired", _repaired)


def _incoherent(wanted: Wanted, mode: str, obfuscate: Obfuscate) -> Iterator[Outcome]:
    setting = _setting(wanted)
    sent, _ = _sent(wanted, setting, _of_name, obfuscate)
    hits = sum(sets.by_coherence(setting.public, s) == s.own for s in sent)
    yield _outcome("incoherent", mode, "a name that is there twice", sent, hits)


def intersection_published(wanted: Wanted) -> Iterator[Outcome]:
    setting, obfuscate = _setting(wanted), _published("program")
    yield _intersection(wanted, setting, "published", "as programmed", lambda: obfuscate)


def intersection_repaired(wanted: Wanted) -> Iterator[Outcome]:
    setting = _setting(wanted)
    yield _intersection(wanted, setting, "repaired", "without a book of secrets", lambda: _repaired)

    def with_book() -> Obfuscate:
        book = Book(None)  # of one process: it keeps account as one in a folder does

        def obfuscate(setting: _Setting, prompt: Prompt) -> Sent:
            rows, own = book.rows(setting.public, prompt, LIMITS)
            return Sent(prompt, [row.tolist() for row in rows], own)

        return obfuscate

    yield _intersection(wanted, setting, "repaired", "with one (--secrets)", with_book)


def _intersection(
    wanted: Wanted, setting: _Setting, mode: str, how: str, user: Callable[[], Obfuscate]
) -> Outcome:
    sent: list[Sent] = []
    hits = 0
    for i in range(_TRIES * wanted.prompts):
        if len(sent) == wanted.prompts:
            break
        prompt, obfuscate = _of_text(setting), user()
        if prompt is None:
            continue
        try:
            again = [obfuscate(setting, prompt) for _ in range(REPEATS)]
        except TooFewError:
            continue
        hits += sets.by_intersection(again) == again[0].own
        sent.append(again[0])
        wanted.on_stage(f"prompt {len(sent)} of {wanted.prompts}, try {i + 1}")
    return _outcome(
        "intersection", mode, f"what {REPEATS} sets of one prompt have in common, {how}", sent, hits
    )


def length_published(wanted: Wanted) -> Iterator[Outcome]:
    setting = _setting(wanted)
    sent, _ = _sent(wanted, setting, _of_text, _published("program"))
    hits = sum(sets.by_length(s) == s.own for s in sent)
    yield _outcome("length", "published", "the longest row, as programmed", sent, hits)


def length_repaired(wanted: Wanted) -> Iterator[Outcome]:
    setting = _setting(wanted)
    sent, _ = _sent(wanted, setting, _of_text, _repaired)
    hits = sum(sets.by_length(s) == s.own for s in sent)
    yield _outcome("length", "repaired", "the longest row", sent, hits)


def compact_published(wanted: Wanted) -> Iterator[Outcome]:
    yield from _compact(wanted, "published", _published("printed"))


def compact_repaired(wanted: Wanted) -> Iterator[Outcome]:
    yield from _compact(wanted, "repaired", _repaired)


def _compact(wanted: Wanted, mode: str, obfuscate: Obfuscate) -> Iterator[Outcome]:
    """On real runs of engine, vault and user: whose answers are those of an exact forward?"""
    setting = _setting(wanted)
    sent, _ = _sent(wanted, setting, _of_text, obfuscate)
    config, params = load_model(wanted.model)
    weights = family_of(config).fold(params, config)
    spans = [
        [] if mode == "repaired" else sorted(i for t in s.shape.targets for i in t) for s in sent
    ]
    wishes = [
        Wish(s.rows, [], 2, 0.7, wanted.seed, fakes, s.own)
        for s, fakes in zip(sent, spans, strict=True)
    ]
    seen = attack_views.of_wishes(wanted.model, wishes, wanted.on_stage)
    hits = 0
    for s, views in zip(sent, seen, strict=True):
        held = recompute.filled(config, weights, s.rows)
        away = [
            recompute.by_answers(held, view, len(s.rows), 1)[i] for i, view in enumerate(views)
        ]
        hits += sets.nearest(away) == s.own
    yield _outcome(
        "compact", mode, "the row whose answers are an exact forward's", sent, hits
    )
