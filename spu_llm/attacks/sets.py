"""Attacks on prompt obfuscation run: real text with a secret in it, the prompts that go out for it,
and which of them an engine takes for the user's.

The engine has read all of them, as `layer0` and `recompute` show that it can; what it goes by here
is how they were chosen (`spu_llm.systems.confidential.attacks.sets`). Only where it goes by its
vault's answers is a vault run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from models.hf import load_folded
from spu_llm.attacks.prompts import Setting, of_distribution, of_name, of_text, setting_of
from spu_llm.attacks.request import AttackConfig
from spu_llm.attacks.views import of_wishes
from spu_llm.core.errors import InputError
from spu_llm.systems.confidential import published
from spu_llm.systems.confidential.attacks import layer0, recompute, sets
from spu_llm.systems.confidential.attacks.sets import Sent
from spu_llm.systems.confidential.attacks.views import Seen
from spu_llm.systems.confidential.book import Book
from spu_llm.systems.confidential.obfuscation import Limits
from spu_llm.systems.confidential.spans import Prompt
from spu_llm.systems.outcome import AttackOutcome
from spu_llm.vault.user import Wish

LIMITS = Limits()
QUICK = replace(LIMITS, beam=128)  # the bound does not depend on it, and there are many prompts
EPSILON = 1 / 8  # as published
REPEATS = 4  # of a prompt
_GENERATED = 4  # tokens that a vault's engine is shown the queries of
_TRIES = 40  # for each prompt that is asked for, until one has fakes


def _setting(wanted: AttackConfig) -> Setting:
    return setting_of(wanted.model, wanted.seed, wanted.public)


# ---- what goes out for them

Obfuscate = Callable[[Setting, Prompt], Sent]


def _repaired(
    setting: Setting, prompt: Prompt, limits: Limits = LIMITS, book: Book | None = None
) -> Sent:
    rows, own, _ = (book or Book(None)).rows(setting.public, prompt, limits)
    return Sent(prompt, [row.tolist() for row in rows], own)


def _published(variant: str) -> Obfuscate:
    def obfuscate(setting: Setting, prompt: Prompt) -> Sent:
        rows, own = published.among_fakes(
            variant, setting.public, prompt, EPSILON, LIMITS.fakes, LIMITS.fewest
        )
        return Sent(prompt, rows, own)

    return obfuscate


def _sent(
    wanted: AttackConfig,
    setting: Setting,
    draw: Callable[[Setting], Prompt | None],
    obfuscate: Obfuscate,
) -> tuple[list[Sent], int]:
    """Return the sets that are asked for, and how many prompts were refused for want of fakes."""
    sent: list[Sent] = []
    refused = 0
    for _ in range(_TRIES * wanted.prompts):
        if len(sent) == wanted.prompts:
            break
        prompt = draw(setting)
        if prompt is None:
            continue
        try:
            sent.append(obfuscate(setting, prompt))
        except InputError:  # too few fakes, or a secret in the clear, too
            refused += 1
        if len(sent) % 10 == 0:
            wanted.on_stage(f"prompt {len(sent)} of {wanted.prompts}")
    if len(sent) < wanted.prompts:
        raise InputError(f"only {len(sent)} prompts have fakes; lower --prompts")
    return sent, refused


def _outcome(
    attack: str, mode: str, what: str, sent: Sequence[Sent], successes: int, notes: str = ""
) -> AttackOutcome:
    """Return the outcome of one guess for each set of prompts."""
    chance = float(np.mean([1 / len(s.rows) for s in sent]))
    fakes = [len(s.rows) - 1 for s in sent]
    spans = len(sent[0].shape.targets)
    bounds = [
        LIMITS.bound(n) if mode == "repaired" else published.claimed_bound(EPSILON, spans, n)
        for n in fakes
    ]
    return AttackOutcome(
        attack, mode, what, len(sent), successes, chance, float(np.mean(bounds)), notes
    )


# ---- runs


def _guessed(
    wanted: AttackConfig,
    attack: str,
    mode: str,
    what: str,
    obfuscate: Obfuscate,
    guess: Callable[[Setting, Sent], int],
    draw: Callable[[Setting], Prompt | None] = of_text,
) -> Iterator[AttackOutcome]:
    """Yield the outcome of one guess for each prompt's set."""
    setting = _setting(wanted)
    sent, _ = _sent(wanted, setting, draw, obfuscate)
    hits = sum(guess(setting, s) == s.own for s in sent)
    yield _outcome(attack, mode, what, sent, hits)


def posterior_published(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    for variant in ("printed", "program"):
        yield from _posterior(wanted, "published", f", {variant}", _published(variant))


def posterior_repaired(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    yield from _posterior(wanted, "repaired", "", partial(_repaired, limits=QUICK))


def _posterior(
    wanted: AttackConfig, mode: str, more: str, obfuscate: Obfuscate
) -> Iterator[AttackOutcome]:
    fewer = replace(wanted, prompts=max(2, wanted.prompts // 5))
    # The bound is about the first: that takes more of them.
    distributions = (
        ("the public model's law", of_distribution, wanted),
        ("real text", of_text, fewer),
    )
    for distribution, draw, of in distributions:
        setting = _setting(wanted)
        sent, refused = _sent(of, setting, draw, obfuscate)
        guesses = [sets.by_likelihood(setting.public, setting.owner, s) for s in sent]
        best, hits, tries = sets.best_of(guesses, [s.own for s in sent])
        yield _outcome(
            "posterior",
            mode,
            f"secrets of {distribution}{more}: {best}",
            sent[-tries:],
            hits,
            f"the best of {len(guesses[0])} guesses on another {len(sent) - tries} prompts; "
            f"{refused} prompts were refused",
        )


def rank_published(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    yield from _guessed(
        wanted,
        "rank",
        "published",
        "the row that gives the others, as printed",
        _published("printed"),
        lambda at, s: sets.by_regeneration(at.public, s, EPSILON, LIMITS.fakes),
    )


def rank_repaired(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    yield from _guessed(
        wanted,
        "rank",
        "repaired",
        "the row whose fakes come again",
        _repaired,
        lambda at, s: sets.by_redrawing(at.public, s, LIMITS),
    )


def incoherent_published(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    yield from _incoherent(wanted, "published", _published("printed"))


def incoherent_repaired(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    yield from _incoherent(wanted, "repaired", _repaired)


def _incoherent(wanted: AttackConfig, mode: str, obfuscate: Obfuscate) -> Iterator[AttackOutcome]:
    yield from _guessed(
        wanted,
        "incoherent",
        mode,
        "a name that is there twice",
        obfuscate,
        lambda at, s: sets.by_coherence(at.public, s),
        of_name,
    )


def intersection_published(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    setting, obfuscate = _setting(wanted), _published("program")
    yield _intersection(wanted, setting, "published", "as programmed", lambda: obfuscate)


def intersection_repaired(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    setting = _setting(wanted)
    yield _intersection(wanted, setting, "repaired", "without a book of secrets", lambda: _repaired)
    # In one process it keeps account as one in a folder does.
    yield _intersection(
        wanted,
        setting,
        "repaired",
        "with one (--secrets)",
        lambda: partial(_repaired, book=Book(None)),
    )


def _intersection(
    wanted: AttackConfig, setting: Setting, mode: str, how: str, user: Callable[[], Obfuscate]
) -> AttackOutcome:
    sent: list[Sent] = []
    hits = 0
    for i in range(_TRIES * wanted.prompts):
        if len(sent) == wanted.prompts:
            break
        prompt, obfuscate = of_text(setting), user()
        if prompt is None:
            continue
        try:
            again = [obfuscate(setting, prompt) for _ in range(REPEATS)]
        except InputError:
            continue
        hits += sets.by_intersection(again) == again[0].own
        sent.append(again[0])
        wanted.on_stage(f"prompt {len(sent)} of {wanted.prompts}, try {i + 1}")
    return _outcome(
        "intersection", mode, f"what {REPEATS} sets of one prompt have in common, {how}", sent, hits
    )


def length_published(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    yield from _longest(wanted, "published", ", as programmed", _published("program"))


def length_repaired(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    yield from _longest(wanted, "repaired", "", _repaired)


def _longest(
    wanted: AttackConfig, mode: str, how: str, obfuscate: Obfuscate
) -> Iterator[AttackOutcome]:
    yield from _guessed(
        wanted, "length", mode, f"the longest row{how}", obfuscate, lambda at, s: sets.by_length(s)
    )


def layer0_published(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    yield from _layer0(wanted, "published", _published("printed"))


def layer0_repaired(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    yield from _layer0(wanted, "repaired", _repaired)


def _layer0(wanted: AttackConfig, mode: str, obfuscate: Obfuscate) -> Iterator[AttackOutcome]:
    """Yield the outcome of layer0 on real runs: it reads all prompts, the user's among them."""
    sent, _ = _sent(wanted, _setting(wanted), of_text, obfuscate)
    config, weights = load_folded(wanted.model)
    made = layer0.dictionary(config, weights, max(len(row) for s in sent for row in s.rows))
    seen = _seen_of(wanted, sent, mode)
    tries = right = 0
    chances = []
    for i, (s, views) in enumerate(zip(sent, seen, strict=True)):
        others = [row for other in sent if other is not s for row in other.rows]
        for row, view in zip(s.rows, views, strict=True):
            wanted.on_stage(f"solving for set {i + 1} of {len(sent)}")
            if not view.steps:  # its text ended at once
                continue
            first = layer0.Dictionary(made.keys[: len(row)], made.values[: len(row)])
            tokens = layer0.recover(first, view.asked(0, len(view.steps))).tokens
            tries, right = tries + len(row), right + int((tokens == row).sum())
            alike = np.array([other for other in others if len(other) == len(row)])
            chances += [layer0.other_prompts_rate(tokens, alike)] if len(alike) else []
    yield AttackOutcome(
        "layer0",
        mode,
        f"the right token at the right position, of every prompt that goes out, "
        f"after {_GENERATED} generated tokens",
        tries,
        right,
        float(np.mean(chances)),
        notes="which of them is the user's is what the other attacks are about",
    )


def compact_published(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    yield from _compact(wanted, "published", _published("printed"))


def compact_repaired(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    yield from _compact(wanted, "repaired", _repaired)


def _compact(wanted: AttackConfig, mode: str, obfuscate: Obfuscate) -> Iterator[AttackOutcome]:
    """Yield the outcome of compact on real runs of engine, vault and user: whose answers are an
    exact forward's?
    """
    sent, _ = _sent(wanted, _setting(wanted), of_text, obfuscate)
    config, weights = load_folded(wanted.model)
    seen = _seen_of(wanted, sent, mode)
    hits = 0
    for s, views in zip(sent, seen, strict=True):
        held = recompute.filled(config, weights, s.rows)
        away = [recompute.by_answers(held, view, len(s.rows), 1)[i] for i, view in enumerate(views)]
        hits += sets.nearest(away) == s.own
    yield _outcome("compact", mode, "the row whose answers are an exact forward's", sent, hits)


def _seen_of(wanted: AttackConfig, sent: Sequence[Sent], mode: str) -> list[list[Seen]]:
    """Return what an engine sees of these sets in a vault's real runs: as published, fakes share
    what is around them.
    """
    wishes = []
    for s in sent:
        compact = [] if mode == "repaired" else s.shape.hidden
        wishes.append(Wish(s.rows, [], _GENERATED + 1, 0.7, wanted.seed, compact, s.own))
    return of_wishes(wanted.model, wishes, wanted.on_stage)
