"""Attacks on the arithmetic of vault mode and of the two-party mode, with tiny models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.family import ModelConfig, family_of
from models.hf import save_model
from models.partials import Partial
from spu_llm.attacks.registry import ATTACKS, place_of
from spu_llm.core.errors import InputError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.confidential.attacks import layer0, length, recompute
from spu_llm.systems.confidential.attacks.views import Seen, Shares, WatchingEngine, asked_of
from spu_llm.systems.decoding import viewed
from spu_llm.systems.outcome import AttackOutcome, wilson
from spu_llm.systems.program import Job, ProviderInputs
from tests.kit.models import LLAMA, PRIVATE, tiny_params
from tests.kit.vaults import Vaults

# Heads wide enough for as many equations as a prompt needs, and a second layer.
WIDE = dataclasses.replace(PRIVATE, n_embd=64, n_head=2, n_layer=2)
LONG = 8
CONFIGS = {"gpt2": WIDE, "llama": dataclasses.replace(LLAMA, hidden_size=64, num_hidden_layers=2)}


def folded(config: ModelConfig) -> Any:
    return family_of(config).fold(tiny_params(config, 1), config)


def seen_of(config: ModelConfig, weights: Any, prompt: list[int], steps: int) -> Seen:
    """Return a vault's answers to a real engine, which generates known tokens."""
    engine = WatchingEngine(config, weights, 1)
    held = recompute.filled(config, weights, [prompt])
    lane = engine.join()
    engine.place(lane, len(prompt))
    for token in range(3, 3 + steps):
        engine.step([lane], [token], Vaults([(held, 0)]))
    (seen,) = engine.seen
    return seen


def prompts_of(config: ModelConfig, count: int) -> np.ndarray:
    source = np.random.default_rng(1)
    return np.asarray(source.integers(1, config.vocab_size, (count, LONG)))


# ---- layer 0


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_0_gives_the_prompt_away(name: str) -> None:
    config = CONFIGS[name]
    weights = folded(config)
    made = layer0.dictionary(config, weights, LONG)
    for prompt in prompts_of(config, 3):
        actual = layer0.recover(made, seen_of(config, weights, prompt.tolist(), 4).asked(0, 4))
        assert actual.tokens.tolist() == prompt.tolist()
        assert actual.residual < 1e-5


def test_layer_0_finds_nothing_in_answers_of_another_layer() -> None:
    weights, right = folded(WIDE), 0
    made = layer0.dictionary(WIDE, weights, LONG)
    prompts = prompts_of(WIDE, 3)
    for prompt in prompts:
        actual = layer0.recover(made, seen_of(WIDE, weights, prompt.tolist(), 4).asked(1, 4))
        right += int((actual.tokens == prompt).sum())
        assert actual.residual > 1e-3
    assert right <= 2


def test_layer_0_finds_nothing_in_random_words() -> None:
    """As one party's shares are: decoded as fixed point they are huge, and of any sign."""
    weights, right, source = folded(WIDE), 0, np.random.default_rng(2)
    made = layer0.dictionary(WIDE, weights, LONG)
    prompts = prompts_of(WIDE, 3)

    def words(like: np.ndarray) -> np.ndarray:
        return source.integers(-(2**63), 2**63, like.shape).astype(np.float64) / 2**18

    for prompt in prompts:
        asked = seen_of(WIDE, weights, prompt.tolist(), 4).asked(0, 4)
        masked = asked._replace(answer=Partial(*(words(part) for part in asked.answer)))
        for view in (masked, masked._replace(query=words(asked.query))):
            right += int((layer0.recover(made, view).tokens == prompt).sum())
    assert right <= 2


# ---- candidates


def test_the_right_candidate_is_the_nearest() -> None:
    weights = folded(WIDE)
    prompt, *_ = prompts = prompts_of(WIDE, 1)
    candidates = np.tile(prompt, (32, 1))
    candidates[:, 2] = np.arange(100, 132)
    candidates[19] = prompts[0]
    held = recompute.filled(WIDE, weights, candidates.tolist())
    seen = seen_of(WIDE, weights, prompt.tolist(), 2)
    assert recompute.by_answers(held, seen, 32, 1).argmin() == 19
    assert recompute.by_states(WIDE, weights, held, seen, 32, 1).argmin() == 19
    # Of another engine, which has other weights, there is nothing to be found.
    other = family_of(WIDE).fold(tiny_params(WIDE, 2), WIDE)
    elsewhere = seen_of(WIDE, other, prompt.tolist(), 2)
    away = recompute.by_answers(held, elsewhere, 32, 1)
    right = recompute.by_answers(held, seen, 32, 1)
    assert right[19] < 1e-9 < 1e-2 < away.min()
    # Under another layer's answers the right one is not near, either.
    for step in seen.steps:
        step.answers.reverse()
    assert recompute.by_answers(held, seen, 32, 1)[19] > 1e-2


# ---- lengths


def test_lengths_tell_what_is_alone_with_its_own() -> None:
    source = np.random.default_rng(0)
    lengths = [length.Lengths(n, g) for n, g in ((4, 9), (7, 9), (7, 3), (7, 3))]
    assert length.guess(length.Lengths(4), lengths, source) == 0
    assert length.guess(length.Lengths(8, 8), lengths, source) == 1
    assert length.guess(length.Lengths(4, 3), lengths, source, ["generated"]) in (2, 3)
    alike = [length.guess(length.Lengths(7, 3), lengths, source) for _ in range(400)]
    assert set(alike) == {2, 3} and 150 < alike.count(2) < 250


# ---- outcomes


def test_wilson_interval() -> None:
    from scipy.stats import binomtest

    for successes, tries in ((0, 10), (3, 10), (320, 320), (1, 2000)):
        expected = binomtest(successes, tries).proportion_ci(0.95, "wilson")
        assert wilson(successes, tries) == pytest.approx((expected.low, expected.high))
    for wrong in ((1, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError):
            wilson(*wrong)


def test_an_outcome_says_whether_it_is_at_chance() -> None:
    actual = AttackOutcome("layer0", "two-party", "a token", 100, 2, 0.01, bound=0.05, notes="seen")
    assert actual.at_chance and not dataclasses.replace(actual, successes=20).at_chance
    assert actual.line() == (
        "layer0, two-party: a token: 2 of 100 = 2.00% (0.55% to 7.00%), chance 1.00% (as often by "
        "luck: 0.26); bound 5.00%; seen"
    )
    # One of 20 at 1 in 256: outside of the interval, and no wonder.
    once = AttackOutcome("recompute", "two-party", "a prompt", 20, 1, 1 / 256)
    assert once.interval[0] > once.chance and once.at_chance
    assert once.by_luck == pytest.approx(1 - (255 / 256) ** 20)
    assert dataclasses.replace(once, successes=0).by_luck == 1


def test_attacks_that_make_no_sense_are_refused() -> None:
    from pkgutil import resolve_name

    for attack in ATTACKS.values():
        assert attack.runs and all(callable(resolve_name(run)) for run in attack.runs.values())
    for name, mode, words in (
        ("nobody", "vault", "choose from layer0"),
        ("layer0", "here", "one of vault, published"),
        ("rank", "two-party", "rank is an attack on published, repaired"),
    ):
        with pytest.raises(InputError, match=words):
            place_of(name, mode)


# ---- two parties


def shares_of(config: ModelConfig, directory: Path, prompts: np.ndarray, steps: int) -> Any:
    """Return [client, provider], of each prompt its shares: both parties as threads."""
    save_model(directory, config, tiny_params(config, 1))
    asked = viewed.ViewedRequest(tuple(map(len, prompts)), steps)
    inputs = viewed.ViewedInputs(prompts.tolist(), [[3, 4][:steps]] * len(prompts))
    told: tuple[list[Shares], list[Shares]] = [], []

    def work(session: PartySession) -> None:
        own = inputs if session.rank == CLIENT else None
        held = ProviderInputs(str(directory)) if session.rank == PROVIDER else None

        def send(event: str, **fields: Any) -> None:
            if event == "seen":
                told[session.rank].append(Shares.of_event(fields))

        viewed.run(session, Job(asked, config, own, held), send)

    with Simulation(seed=1) as simulation:
        simulation.run(work)
    each = 1 + steps
    starts = range(0, each * len(prompts), each)
    return [[rank[at : at + each] for at in starts] for rank in told]


@pytest.mark.slow
def test_one_partys_shares_say_nothing_and_both_say_all(tmp_path: Path) -> None:
    """What both have together gives the prompt away: so these are the words to be attacked."""
    config, prompts = WIDE.with_layers(1), prompts_of(WIDE, 2)
    made = layer0.dictionary(config, folded(config), LONG + 1)
    right, nearest = {"one": 0, "both": 0}, {"one": 0, "both": 0}
    for prompt, *shares in zip(prompts, *shares_of(config, tmp_path, prompts, 1), strict=True):
        both = asked_of([a + b for a, b in zip(*shares, strict=True)], 1)
        views = {"both": [both], "one": [asked_of(own, 1) for own in shares]}
        views["one"] += [view._replace(query=both.query) for view in views["one"]]
        candidates = np.tile([*prompt, 3], (32, 1))
        candidates[:, 2] = np.arange(100, 132)
        candidates[19] = [*prompt, 3]
        for which, of_all in views.items():
            for view in of_all:
                tokens = layer0.recover(made, view, 1e-3).tokens[:LONG]
                right[which] += int((tokens == prompt).sum())
                away = recompute.by_first_layer(made, view, candidates)
                nearest[which] += int(away.argmin() == 19)
    assert right["both"] >= 0.9 * prompts.size and nearest["both"] == len(prompts)
    # 64 tries of one in 288, and 8 of one in 32.
    assert right["one"] <= 3 and nearest["one"] <= 3
