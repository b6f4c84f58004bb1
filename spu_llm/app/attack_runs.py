"""Attacks run: prompts, real views of them (`attack_views`), and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from models.family import ModelConfig, family_of
from models.hf import load_model
from models.tokenizer import Tokenizer
from models.training.snippets import SHIPPED, read_snippets
from spu_llm.app import attack_views
from spu_llm.app.attacking import Wanted
from spu_llm.core.errors import InputError
from spu_llm.systems.confidential.attacks import layer0, length, recompute
from spu_llm.systems.confidential.attacks.outcome import Outcome
from spu_llm.systems.confidential.attacks.views import Seen

PROMPT_TOKENS = 16
STEPS = (1, 2, 4, 8)  # generated tokens that the layer-0 attack is given
TEMPERATURE = 0.7
CANDIDATES = 256  # for a secret of one token
SHORTEST, LONGEST = 8, 64  # tokens of prompts whose lengths are looked at
GENERATED = 48  # tokens after those, if nothing ends a text


class _Model(NamedTuple):
    config: ModelConfig
    weights: Any  # folded


def _model(wanted: Wanted) -> _Model:
    config, params = load_model(wanted.model)
    return _Model(config, family_of(config).fold(params, config))


def _texts(wanted: Wanted) -> list[list[int]]:
    """Held-out excerpts, in tokens."""
    tokenizer = Tokenizer.load(wanted.model)
    return [tokenizer.encode(s.text) for s in read_snippets(SHIPPED / "held_out.jsonl")]


def _prompts(wanted: Wanted) -> np.ndarray:
    """Other pieces of held-out text, int [n, PROMPT_TOKENS]: first as many as are asked for, then
    the others.
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


def layer0_vault(wanted: Wanted) -> Iterator[Outcome]:
    """Tokens in their places, and prompts as bags of tokens, by how many generated tokens."""
    model, prompts = _model(wanted), _prompts(wanted)
    asked = prompts[: wanted.prompts].tolist()
    seen = attack_views.of_vault(
        wanted.model, asked, max(STEPS), TEMPERATURE, wanted.seed, wanted.on_stage
    )
    wanted.on_stage("keys and values of all tokens")
    made = layer0.dictionary(*model, PROMPT_TOKENS)
    for steps in STEPS:
        wanted.on_stage(f"solving with {steps} generated tokens")
        found = [
            (i, layer0.recover(made, text.asked(0, steps)))
            for i, text in enumerate(seen)
            if len(text.steps) >= steps
        ]
        right = sum(int((f.tokens == prompts[i]).sum()) for i, f in found)
        alike = sum(_common(f.tokens, prompts[i]) for i, f in found)
        whole = sum(bool((f.tokens == prompts[i]).all()) for i, f in found)
        chance = [layer0.other_prompts_rate(f.tokens, _others(prompts, i)) for i, f in found]
        bags = [
            np.mean([_common(f.tokens, other) for other in _others(prompts, i)]) / PROMPT_TOKENS
            for i, f in found
        ]
        after = f"after {steps} generated token{'s' if steps > 1 else ''}"
        residual = max(f.residual for _, f in found)
        yield Outcome(
            "layer0", "vault", f"the right token at the right position, {after}",
            PROMPT_TOKENS * len(found), right, float(np.mean(chance)),
            notes=f"{whole} of {len(found)} prompts whole; largest residual {residual:.0e}",
        )  # fmt: skip
        yield Outcome(
            "layer0", "vault", f"a token of the prompt, wherever it stands, {after}",
            PROMPT_TOKENS * len(found), alike, float(np.mean(bags)),
        )  # fmt: skip


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two prompts have in common, in any order."""
    tokens = np.intersect1d(one, other)
    return sum(min(int((one == t).sum()), int((other == t).sum())) for t in tokens)


# ---- candidates


def recompute_vault(wanted: Wanted) -> Iterator[Outcome]:
    """Other prompts as candidates; and the prompt itself with other tokens in one place."""
    model, prompts = _model(wanted), _prompts(wanted)
    asked = prompts[: wanted.prompts].tolist()
    seen = attack_views.of_vault(
        wanted.model, asked, max(STEPS), TEMPERATURE, wanted.seed, wanted.on_stage
    )
    some = prompts[: max(CANDIDATES, wanted.prompts)]
    source = np.random.default_rng([wanted.seed, 1])
    hits: dict[tuple[str, str], list[bool]] = {}
    for i, text in enumerate(seen):
        wanted.on_stage(f"candidates of prompt {i + 1} of {len(seen)}")
        vocab = model.config.vocab_size
        place = int(source.integers(PROMPT_TOKENS))
        spelt = np.tile(prompts[i], (min(CANDIDATES, vocab), 1))
        wrong = np.delete(np.arange(vocab), prompts[i][place])
        at = int(source.integers(len(spelt)))  # of the right one: a tie gains nothing
        spelt[np.arange(len(spelt)) != at, place] = source.choice(
            wrong, len(spelt) - 1, replace=False
        )
        lists = [("other prompts", some, i), ("one token replaced", spelt, at)]
        for name, candidates, right in lists:
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
            for how, distances in away.items():
                hits.setdefault((name, how), []).append(int(distances.argmin()) == right)
    for (name, how), found in hits.items():
        count = len(some) if name == "other prompts" else min(CANDIDATES, model.config.vocab_size)
        yield Outcome(
            "recompute", "vault", f"the right one of {count} candidates ({name}), {how}",
            len(found), sum(found), 1 / count,
        )  # fmt: skip


# ---- lengths


def length_vault(wanted: Wanted) -> Iterator[Outcome]:
    prompts = _of_all_lengths(wanted)
    seen = attack_views.of_vault(
        wanted.model, prompts, GENERATED, TEMPERATURE, wanted.seed, wanted.on_stage
    )
    yield from _by_length("vault", wanted, prompts, [(text.length, text) for text in seen])


def _of_all_lengths(wanted: Wanted) -> list[list[int]]:
    """Beginnings of held-out excerpts, of lengths drawn at random."""
    source, texts = np.random.default_rng(wanted.seed), _texts(wanted)
    texts = [text for text in texts if len(text) >= LONGEST]
    if len(texts) < wanted.prompts:
        raise InputError(f"--prompts: held-out text has {len(texts)} excerpts for that")
    order = source.permutation(len(texts))[: wanted.prompts]
    return [texts[i][: source.integers(SHORTEST, LONGEST + 1)] for i in order]


def _by_length(
    mode: str, wanted: Wanted, prompts: list[list[int]], seen: list[tuple[int, Seen]]
) -> Iterator[Outcome]:
    source = np.random.default_rng([wanted.seed, 1])
    candidates = [length.Lengths(len(prompt)) for prompt in prompts]
    right = sum(
        length.guess(length.Lengths(found), candidates, source) == i
        for i, (found, _) in enumerate(seen)
    )
    ended = sum(len(text.steps) < GENERATED for _, text in seen)
    yield Outcome(
        "length", mode, f"the right one of {len(prompts)} prompts, by its length alone",
        len(seen), right, 1 / len(prompts),
        notes=f"{len(set(map(len, prompts)))} lengths; {ended} texts ended before the "
        f"{GENERATED + 1} tokens that were asked for",
    )  # fmt: skip
