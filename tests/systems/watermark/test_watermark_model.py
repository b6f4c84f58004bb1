"""Marks in the text of a model: lanes, retokenised text, strength, and the noise of races."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from models.hf import load_folded
from models.stops import Stops
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.race import Race
from spu_llm.api.defaults import shipped
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.cdfs import Family
from spu_llm.systems.watermark.detecting import detect
from spu_llm.systems.watermark.embedding import Embedder
from spu_llm.systems.watermark.history import History
from spu_llm.systems.watermark.keys import KeyFile, Scheme, token_unit
from spu_llm.systems.watermark.model_sampler import ModelSampler, spread_points
from spu_llm.systems.watermark.race_marks import MarkedNoise, gumbel, race_text, scored, uniforms
from spu_llm.systems.watermark.selecting import choose
from spu_llm.systems.watermark.units import TokenUnits, WordUnits
from tests.systems.watermark.chains import FALSE_ALARM, key_of, p_value

SAMPLING = Sampling(1.0)
PROMPT = "def read_config(path):\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(shipped("public"))


@pytest.fixture(scope="module")
def sampler(tokenizer: Tokenizer) -> ModelSampler:
    """Return the smaller shipped model, which never ends a text by itself."""
    config, weights = load_folded(shipped("public"))
    return ModelSampler(config, weights, frozenset(), SAMPLING, Prg.from_seed(0, "sampler"))


def test_lanes_sample_what_the_model_says(
    sampler: ModelSampler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of each candidate is drawn from the distribution after all before it."""
    prompt, rows = tuple(tokenizer.encode(PROMPT)), []
    draw = sampler._draw
    monkeypatch.setattr(sampler, "_draw", lambda p, group: rows.append(p) or draw(p, group))
    drawn = sampler.sample(prompt, 3, 4)
    assert len(rows) == 4 and all(len(one.content) == 4 and not one.ended for one in drawn)
    for lane, one in enumerate(drawn):
        for i in range(4):
            fresh = sampler.distribution((*prompt, *one.content[:i]))
            assert rows[i][lane] == pytest.approx(fresh, rel=1e-3, abs=1e-7)
    with pytest.raises(InputError, match="context of 256"):
        sampler.sample(prompt, 1, 256)


def test_spread_candidates_are_fair_and_differ_more() -> None:
    """Points are uniform, lane by lane, and one in each of g parts. False alarm: 1e-6 a test."""
    group, prg = np.array([0, 0, 1, 0, 1, 0]), Prg.from_seed(7, "points")
    points = np.array([spread_points(prg, group) for _ in range(1500)])
    for lane in range(6):
        assert stats.kstest(points[:, lane], "uniform").pvalue > FALSE_ALARM
    first = np.sort(points[:, group == 0], axis=1)
    assert np.diff(first, axis=1) == pytest.approx(0.25)


@pytest.mark.parametrize("spread", [False, True])
def test_candidates_have_the_distribution_of_the_model(spread: bool) -> None:
    """Four candidates that share their draws, or do not: the first of them, and who is chosen."""
    config, weights = load_folded(shipped("public"))
    prg, distribution = Prg.from_seed(7, f"draws {spread}"), {0: 0.5, 1: 0.3, 2: 0.2}
    sampler = ModelSampler(config, weights, frozenset(), SAMPLING, prg, spread=spread)
    rows, first, chosen, distinct = np.tile(list(distribution.values()), (4, 1)), [], [], 0
    for trial in range(3000):
        drawn = sampler._draw(rows, np.zeros(4, int)).tolist()
        tokens = sorted(set(drawn))
        grams = [[(token_unit(token),)] for token in tokens]
        counts = [drawn.count(token) for token in tokens]
        first.append(drawn[0])
        chosen.append(tokens[choose(key_of(trial), grams, counts, Family(), prg).index])
        distinct += len(tokens)
    assert (
        p_value(first, distribution) > FALSE_ALARM and p_value(chosen, distribution) > FALSE_ALARM
    )
    independent = sum(1 - (1 - p) ** 4 for p in distribution.values()) * 3000
    assert (distinct > 1.05 * independent) == spread


def test_ends_cut_candidates(tokenizer: Tokenizer) -> None:
    config, weights = load_folded(shipped("public"))
    everything = frozenset(range(config.vocab_size))
    sampler = ModelSampler(config, weights, everything, SAMPLING)
    prompt = tuple(tokenizer.encode(PROMPT))
    assert [tuple(one) for one in sampler.sample(prompt, 2, 3)] == [((), True)] * 2
    mark = Embedder((key_of(0),), Scheme(4), sampler, TokenUnits(), 4, 3)
    made = mark.text(prompt, 20)
    assert (made.content, made.reason) == ((), "eos")


def test_marks_survive_text_and_back(sampler: ModelSampler, tokenizer: Tokenizer) -> None:
    """100 tokens, k = 1, m = 16: from the text alone each is found, and far apart from what other
    keys say of them; the same by words, and by all candidates.
    """
    prompt = tuple(tokenizer.encode(PROMPT))
    units, words = TokenUnits(tokenizer), WordUnits(tokenizer)
    marked, others = [], []
    for number in range(2):
        own = Prg.from_seed(number, "choices")
        mark = Embedder((key_of(number),), Scheme(4), sampler, units, 16, 1, prg=own)
        made = mark.text(prompt, 100)
        text = tokenizer.decode(made.content)
        for seen in range(60):
            file = KeyFile(key_of(seen), Scheme(4))
            log_p = detect([file], [units], text, locate=False).log_p
            (marked if seen == number else others).append(log_p)
    assert max(marked) < math.log(1e-6) and len(others) == 118 and min(others) > math.log(1e-6)
    own = Prg.from_seed(9, "choices")
    by_words = Embedder((key_of(9),), Scheme(3, units="words"), sampler, words, 8, 6, prg=own)
    text = tokenizer.decode(by_words.text(prompt, 90).content)
    file = KeyFile(key_of(9), Scheme(3, units="words"))
    assert detect([file], [WordUnits()], text).log_p < math.log(1e-3)
    limit = Embedder((key_of(8),), Scheme(4), sampler, units, None, 1, prg=own)
    text = tokenizer.decode(limit.text(prompt, 20).content)
    assert detect([KeyFile(key_of(8), Scheme(4))], [units], text).log_p < math.log(1e-4)


@settings(max_examples=40)
@given(text=st.text(max_size=30))
def test_tokens_stand_where_their_text_does(text: str) -> None:
    tokenizer = Tokenizer.load(shipped("public"))
    placed = TokenUnits(tokenizer).placed(text)
    assert [unit.value for unit in placed] == [token_unit(t) for t in tokenizer.encode(text)]
    edges = [edge for unit in placed for edge in (unit.start, unit.end)]
    assert edges == sorted(edges) and all(0 <= edge <= len(text) for edge in edges)
    assert not text or (edges[0], edges[-1]) == (0, len(text))


def test_stop_strings_end_a_text_before_them(sampler: ModelSampler, tokenizer: Tokenizer) -> None:
    prompt = tuple(tokenizer.encode(PROMPT))
    mark = Embedder((key_of(0),), Scheme(4), sampler, TokenUnits(tokenizer), 4, 4)
    made = mark.text(prompt, 100, Stops.of([" "], tokenizer), tokenizer.decode)
    assert made.reason == "stop" and " " not in tokenizer.decode(made.content)


# ---- races


def test_noise_is_the_races_own() -> None:
    """Bit for bit what `Race` makes of the same stream; marked rows by the same steps."""
    race, private = Race(SAMPLING), Prg.from_seed(1, "client")
    noise = MarkedNoise(key_of(0), 3, 500, History(), private)
    text = [5, 6, 7, 8, 6, 7]  # whose last two tokens stood there before
    assert not noise.fresh(text) and noise.fresh(text[:5])
    own = race._noise(500, len(text), Streams(private, private))
    assert np.array_equal(noise.row(text), own)
    stream = key_of(0).stream([token_unit(8), token_unit(6)])
    expected = -np.log(-np.log(np.clip(stream.uniform((500,)), 2.0**-53, 1 - 2.0**-53)))
    assert np.array_equal(noise.row(text[:5]), expected)
    assert np.isfinite(gumbel(np.array([2.0**-53, 1 - 2.0**-53]))).all()
    # A smaller vocabulary has the same numbers.
    assert np.array_equal(uniforms(key_of(0), (1,), 9), uniforms(key_of(0), (1,), 500)[:9])


def test_drafts_change_nothing_of_a_marked_race() -> None:
    """Drafts by another model with the same noise: what is emitted is the text without drafts, and
    more than one token a step.
    """
    source = np.random.default_rng(0)
    private = source.normal(size=(40, 40)) * 1.5
    public = private + source.normal(size=(40, 40)) * 0.5

    def noise() -> MarkedNoise:
        return MarkedNoise(key_of(4), 2, 40, History(), Prg.from_seed(2, "own"))

    def softmax(row: np.ndarray) -> np.ndarray:
        return np.exp(row) / np.exp(row).sum()

    plain, _ = race_text(lambda text: softmax(private[text[-1]]), noise(), (0,), 60, frozenset())
    rows, emitted, steps = noise(), [0], 0
    while len(emitted) <= 60:
        drafts: list[int] = []
        for _ in range(4):
            text = [*emitted, *drafts]
            drafts.append(int(np.argmax(public[text[-1]] + rows.row(text[1:]))))
        for i in range(5):
            text = [*emitted, *drafts[:i]]
            token = int(np.argmax(private[text[-1]] + rows.row(text[1:])))
            if i == 4 or token != drafts[i]:
                emitted = [*text, token]
                break
        steps += 1
    assert tuple(emitted[1:61]) == plain and steps < 45


def test_a_marked_race_is_found(sampler: ModelSampler, tokenizer: Tokenizer) -> None:
    prompt, key = tuple(tokenizer.encode(PROMPT)), key_of(6)
    history = History()
    noise = MarkedNoise(key, 4, sampler.vocab, history)
    tokens, ended = race_text(sampler.distribution, noise, prompt, 60, frozenset())
    noise.finish(tokens)
    assert len(tokens) == 60 and not ended and len(history) > 40
    scheme = Scheme(4, Family(), method="race")
    text = tokenizer.decode(tokens)
    evidence = detect([KeyFile(key, scheme)], [TokenUnits(tokenizer)], text)
    assert evidence.log_p < math.log(1e-12)
    other = detect([KeyFile(key_of(7), scheme)], [TokenUnits(tokenizer)], text)
    assert other.log_p > math.log(1e-6)
    assert len(scored(key, tokens, 4)) == 60
