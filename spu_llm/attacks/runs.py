"""Attacks run: prompts, real views of them (`views`), and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from models.family import ModelConfig
from models.hf import load_folded
from models.tokenizer import Tokenizer
from spu_llm.attacks.prompts import held_out
from spu_llm.attacks.request import AttackConfig
from spu_llm.attacks.views import of_two_parties, of_vault
from spu_llm.core.errors import InputError
from spu_llm.systems.confidential.attacks import layer0, length, recompute
from spu_llm.systems.confidential.attacks.views import LayerQueries, Shares, asked_of
from spu_llm.systems.outcome import AttackOutcome

PROMPT_TOKENS = 16
STEPS = (1, 2, 4, 8)  # generated tokens that the layer-0 attack is given
SHARED_STEPS = 2  # of the two-party mode, besides the prompt's last row
ON_SHARES = 1e-3  # relative error of answers there
TEMPERATURE = 0.7
CANDIDATES = 256  # for a secret of one token
SHORTEST, LONGEST = 4, 32  # tokens of prompts whose lengths are looked at
GENERATED = 128  # tokens after those, if nothing ends a text
OWN_SEED = 10_000  # of the owner's own runs, after that of the user's


class _Model(NamedTuple):
    config: ModelConfig
    weights: Any  # folded


def _model(wanted: AttackConfig) -> _Model:
    return _Model(*load_folded(wanted.model))


def _texts(wanted: AttackConfig) -> list[list[int]]:
    return held_out(Tokenizer.load(wanted.model))


def _prompts(wanted: AttackConfig) -> np.ndarray:
    """Return different pieces of held-out text in random order, int [n, PROMPT_TOKENS]: first as
    many as are asked for, then the others.
    """
    pieces = [
        text[at : at + PROMPT_TOKENS]
        for text in _texts(wanted)
        for at in range(0, len(text) - PROMPT_TOKENS + 1, PROMPT_TOKENS)
    ]
    unique = np.unique(np.array(pieces), axis=0)
    if len(unique) < wanted.prompts:
        raise InputError(f"--prompts: held-out text has {len(unique)} pieces for that")
    return np.asarray(np.random.default_rng(wanted.seed).permutation(unique))


def _others(prompts: np.ndarray, i: int) -> np.ndarray:
    return np.delete(prompts, i, axis=0)


# ---- layer 0


def layer0_vault(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    """Yield what attack layer0 solves from a vault's engine, by how many generated tokens."""
    model, prompts = _model(wanted), _prompts(wanted)
    asked = prompts[: wanted.prompts].tolist()
    seen = of_vault(wanted.model, asked, max(STEPS), TEMPERATURE, wanted.seed, wanted.on_stage)
    made = layer0.dictionary(*model, PROMPT_TOKENS)
    for steps in STEPS:
        wanted.on_stage(f"solving, generated tokens: {steps}")
        views = [
            (i, text.asked(0, steps)) for i, text in enumerate(seen) if len(text.steps) >= steps
        ]
        after = f"after {steps} generated token{'s' if steps > 1 else ''}"
        if not views:  # all texts ended before
            return
        yield from _solved("vault", made, prompts, views, after)


def layer0_two_party(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    """Yield what attack layer0 solves from the provider's words; and, so that it is seen that these
    are the right ones, from hers and the client's together, which nobody has.
    """
    model, prompts = _model(wanted), _prompts(wanted)
    shares = _two_parties(wanted, prompts)
    made = layer0.dictionary(*model, PROMPT_TOKENS + SHARED_STEPS)
    groups = model.config.query_groups
    own = [asked_of(provider, groups) for _, provider in shares]
    both = [asked_of([a + b for a, b in zip(*of_both, strict=True)], groups) for of_both in shares]
    told = [view._replace(query=true.query) for view, true in zip(own, both, strict=True)]
    ones = np.mean(np.unpackbits(np.concatenate([_bytes(provider) for _, provider in shares])))
    yield from _solved(
        "two-party",
        made,
        prompts,
        list(enumerate(own)),
        "from the provider's words",
        f"ones among their bits: {ones:.3%}",
    )
    yield from _solved(
        "two-party", made, prompts, list(enumerate(told)), "from these and the true queries"
    )
    yield from _solved(
        "two-party",
        made,
        prompts,
        list(enumerate(both)),
        "from both parties' words, which nobody has",
        error=ON_SHARES,
    )


def _two_parties(
    wanted: AttackConfig, prompts: np.ndarray
) -> list[tuple[list[Shares], list[Shares]]]:
    """Return shares of as many prompts as are asked for, each with some text after it."""
    asked, more = prompts[: wanted.prompts], np.roll(prompts, 1, axis=0)[: wanted.prompts]
    tokens = more[:, :SHARED_STEPS].tolist()
    return of_two_parties(wanted.model, asked.tolist(), tokens, wanted.on_stage)


def _bytes(shares: list[Shares]) -> np.ndarray:
    """Return the bytes of all words of a party's but the short ones."""
    words = [part.words[name] for part in shares for name in ("query", "mass", "out")]
    return np.concatenate([w.ravel() for w in words]).view(np.uint8)


def _solved(
    mode: str,
    made: layer0.Dictionary,
    prompts: np.ndarray,
    views: list[tuple[int, LayerQueries]],
    how: str,
    notes: str = "",
    error: float = layer0.FLOAT32,
) -> Iterator[AttackOutcome]:
    """Yield how many tokens are solved in their places, and how many of prompts as bags of tokens;
    views by their prompt's number.
    """
    guesses = []
    for i, view in views:
        solved = layer0.recover(made, view, error)
        guesses.append((i, solved._replace(tokens=solved.tokens[:PROMPT_TOKENS])))
    right = sum(int((f.tokens == prompts[i]).sum()) for i, f in guesses)
    alike = sum(_common(f.tokens, prompts[i]) for i, f in guesses)
    whole = sum(bool((f.tokens == prompts[i]).all()) for i, f in guesses)
    chance = [layer0.other_prompts_rate(f.tokens, _others(prompts, i)) for i, f in guesses]
    bags = [
        np.mean([_common(f.tokens, other) for other in _others(prompts, i)]) / PROMPT_TOKENS
        for i, f in guesses
    ]
    residual = max(f.residual for _, f in guesses)
    said = f"{whole} of {len(guesses)} prompts whole; largest residual {residual:.0e}"
    yield AttackOutcome(
        "layer0",
        mode,
        f"the right token at the right position, {how}",
        PROMPT_TOKENS * len(guesses),
        right,
        float(np.mean(chance)),
        notes=f"{said}; {notes}" if notes else said,
    )
    yield AttackOutcome(
        "layer0",
        mode,
        f"a token of the prompt, wherever it stands, {how}",
        PROMPT_TOKENS * len(guesses),
        alike,
        float(np.mean(bags)),
    )


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many tokens two prompts have in common, in any order."""
    tokens = np.intersect1d(one, other)
    return sum(min(int((one == t).sum()), int((other == t).sum())) for t in tokens)


# ---- candidates


def recompute_vault(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    """Yield how often attack recompute finds the prompt of a vault's user, with other prompts as
    candidates; and with the prompt itself with other tokens in one place.
    """
    model, prompts = _model(wanted), _prompts(wanted)
    asked = prompts[: wanted.prompts].tolist()
    seen = of_vault(wanted.model, asked, max(STEPS), TEMPERATURE, wanted.seed, wanted.on_stage)
    source = np.random.default_rng([wanted.seed, 1])
    hits: Hits = {}
    for i, text in enumerate(seen):
        wanted.on_stage(f"candidates of prompt {i + 1} of {len(seen)}")
        for name, candidates, right in _candidates(prompts, i, model.config.vocab_size, source):
            held = recompute.filled(*model, candidates.tolist())
            count = len(candidates)
            away = {
                "by the vault's answers to one token": recompute.by_answers(held, text, count, 1),
                "by the engine's own logits after one token": recompute.by_states(
                    *model, held, text, count, 1
                ),
                f"by its logits after {max(STEPS)}": recompute.by_states(
                    *model, held, text, count, max(STEPS)
                ),
            }
            _judge(hits, name, candidates, right, away)
    yield from _judged("vault", hits)


def recompute_two_party(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    """Yield how often attack recompute finds the client's prompt from the provider's words of the
    first layer; and from both parties' together.
    """
    model, prompts = _model(wanted), _prompts(wanted)
    shares = _two_parties(wanted, prompts)
    made = layer0.dictionary(*model, PROMPT_TOKENS)
    source, groups = np.random.default_rng([wanted.seed, 1]), model.config.query_groups
    hits: Hits = {}
    for i, (client, provider) in enumerate(shares):
        wanted.on_stage(f"candidates of prompt {i + 1} of {len(shares)}")
        own = asked_of(provider[:1], groups)
        both = asked_of([client[0] + provider[0]], groups)
        for name, candidates, right in _candidates(prompts, i, model.config.vocab_size, source):
            away = {
                "by the provider's words": own,
                "by these and the true queries": own._replace(query=both.query),
                "by both parties' words, which nobody has": both,
            }
            distances = {
                how: recompute.by_first_layer(made, view, candidates) for how, view in away.items()
            }
            _judge(hits, name, candidates, right, distances)
    yield from _judged("two-party", hits)


Hits = dict[tuple[str, int, str], list[bool]]  # by candidates, their number, how they were judged


def _candidates(
    prompts: np.ndarray, i: int, vocab: int, source: np.random.Generator
) -> Iterator[tuple[str, np.ndarray, int]]:
    """Yield candidates for prompt i: other prompts, and the prompt with other tokens at one place;
    which is right was drawn, so that a tie gains nothing.
    """
    place = int(source.integers(PROMPT_TOKENS))
    spelt = np.tile(prompts[i], (min(CANDIDATES, vocab), 1))
    wrong = np.delete(np.arange(vocab), prompts[i][place])
    at = int(source.integers(len(spelt)))
    others = source.choice(_others(prompts, i), min(CANDIDATES, len(prompts)) - 1, replace=False)
    where = int(source.integers(len(others) + 1))
    yield "other prompts", np.insert(others, where, prompts[i], axis=0), where
    spelt[np.arange(len(spelt)) != at, place] = source.choice(wrong, len(spelt) - 1, replace=False)
    yield "one token replaced", spelt, at


def _judge(
    hits: Hits, name: str, candidates: np.ndarray, right: int, away: Mapping[str, np.ndarray]
) -> None:
    for how, distances in away.items():
        key = name, len(candidates), how
        hits.setdefault(key, []).append(int(distances.argmin()) == right)


def _judged(mode: str, hits: Hits) -> Iterator[AttackOutcome]:
    for (name, count, how), tries in hits.items():
        yield AttackOutcome(
            "recompute",
            mode,
            f"the right one of {count} candidates ({name}), {how}",
            len(tries),
            sum(tries),
            1 / count,
        )


# ---- lengths


def length_vault(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    """Yield how often lengths tell the prompt of a vault's user, also when texts end: the owner
    generates after each candidate herself, and compares.
    """
    prompts = _of_all_lengths(wanted)
    runs = [
        of_vault(
            wanted.model, prompts, GENERATED, TEMPERATURE, wanted.seed + other, wanted.on_stage
        )
        for other in (0, OWN_SEED)
    ]
    seen, own = ([length.Lengths(text.length, len(text.steps)) for text in run] for run in runs)
    ended = sum(one.generated < GENERATED for one in seen)
    notes = f"{ended} texts ended before the {GENERATED + 1} tokens that were asked for"
    yield _by_length("vault", wanted, "prompt", seen, own)
    yield _by_length("vault", wanted, "generated", seen, own, notes)
    yield _by_length("vault", wanted, "both", seen, own, notes)


def length_two_party(wanted: AttackConfig) -> Iterator[AttackOutcome]:
    """Yield how often the prompt's length, which is public in this mode, too, tells the prompt."""
    prompts = _of_all_lengths(wanted)
    shares = of_two_parties(wanted.model, prompts, [[] for _ in prompts], wanted.on_stage)
    seen = [length.Lengths(provider[0].rows) for _, provider in shares]
    candidates = [length.Lengths(len(prompt)) for prompt in prompts]
    yield _by_length("two-party", wanted, "prompt", seen, candidates)


def _of_all_lengths(wanted: AttackConfig) -> list[list[int]]:
    """Return beginnings of held-out excerpts, of lengths drawn at random."""
    source, texts = np.random.default_rng(wanted.seed), _texts(wanted)
    texts = [text for text in texts if len(text) >= LONGEST]
    if len(texts) < wanted.prompts:
        raise InputError(f"--prompts: held-out text has {len(texts)} excerpts for that")
    order = source.permutation(len(texts))[: wanted.prompts]
    return [texts[i][: source.integers(SHORTEST, LONGEST + 1)] for i in order]


def _by_length(
    mode: str,
    wanted: AttackConfig,
    by: str,
    seen: list[length.Lengths],
    candidates: list[length.Lengths],
    notes: str = "",
) -> AttackOutcome:
    """Return how often lengths tell the prompt. by: "prompt", "generated" or "both"; candidates in
    the order of `seen`.
    """
    source, fields = np.random.default_rng([wanted.seed, 1]), ("prompt", "generated")
    if by != "both":
        fields = (by,)  # type: ignore[assignment]
    right = sum(length.guess(one, candidates, source, fields) == i for i, one in enumerate(seen))
    alone = len({tuple(getattr(one, field) for field in fields) for one in candidates})
    how = {
        "prompt": "the prompt's length",
        "generated": "the number of generated tokens",
        "both": "the prompt's length and the number of generated tokens",
    }
    said = f"{alone} different ones among the candidates"
    return AttackOutcome(
        "length",
        mode,
        f"the right one of {len(candidates)} prompts, by {how[by]} alone",
        len(seen),
        right,
        1 / len(candidates),
        notes=f"{said}; {notes}" if notes else said,
    )
