"""Candidates that are no samples: beams, by enumeration of a toy vocabulary, and rewritings of one
sample. Both mark, and neither keeps the model's distribution.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from models.hf import load_folded
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling
from spu_llm.api.defaults import shipped
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.beams import BeamSampler, beam_search
from spu_llm.systems.watermark.embedding import Embedder
from spu_llm.systems.watermark.keys import Scheme
from spu_llm.systems.watermark.model_sampler import ANY, ModelSampler
from spu_llm.systems.watermark.rewriting import BLOCK, Rewriter
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.units import Content, TokenUnits
from tests.systems.watermark.chains import FALSE_ALARM, Chain, key_of, p_value

CHAIN = Chain(Prg.from_seed(0, ""))
NOTHING_ENDS: frozenset[int] = frozenset()


class ChainBeams:
    """The beams of a chain."""

    def __init__(self, ends: frozenset[int] = NOTHING_ENDS) -> None:
        self._ends = ends

    def sample(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
        assert not isinstance(prefix, str)
        beams = [tuple(prefix)]

        def grow(parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
            beams[:] = [(*beams[i], t) for i, t in zip(parents, tokens.tolist(), strict=True)]
            return np.log([CHAIN.distribution(beam) for beam in beams])

        first = np.log(CHAIN.distribution(tuple(prefix)))
        return beam_search(first, grow, n, max_tokens, self._ends)


def by_enumeration(m: int, k: int, chunks: int) -> dict[tuple[int, ...], float]:
    """Return the distribution, over keys, of a text of beams: each of the m is as likely."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(chunks):
        longer: dict[tuple[int, ...], float] = {}
        for text, p in texts.items():
            for beam in ChainBeams().sample((0, *text), m, k):
                assert not isinstance(beam.content, str)
                whole = text + beam.content
                longer[whole] = longer.get(whole, 0) + p / m
        texts = longer
    return texts


def distance(one: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    """Return the total variation distance of two distributions."""
    return sum(abs(one.get(x, 0) - other.get(x, 0)) for x in one.keys() | other.keys()) / 2


def test_a_wide_beam_holds_every_text_in_order() -> None:
    every = CHAIN.text_distribution(3)
    beams = ChainBeams().sample((0,), 27, 3)
    p = [every[one.content] for one in beams]  # type: ignore[index]
    assert {one.content for one in beams} == set(every)
    assert all(one >= other - 1e-12 for one, other in itertools.pairwise(p))
    assert ChainBeams().sample((0,), 30, 3) == [*beams, *beams[:3]]


def test_a_beam_that_ends_keeps_its_place() -> None:
    """The chain's 2 ends a text: of the beams of two tokens those stay that are the likeliest."""
    every = {Drawn((), True): 0.2}
    for text, p in CHAIN.text_distribution(2).items():
        if text[0] != 2:
            every[Drawn(text[:1], True) if text[1] == 2 else Drawn(text, False)] = p
    best = sorted(every, key=lambda one: -every[one])
    assert ChainBeams(frozenset({2})).sample((0,), 4, 2) == best[:4]


@pytest.mark.parametrize(
    ("m", "k", "chunks", "far"), [(2, 1, 3, 0.46), (2, 2, 2, 0.75), (3, 2, 2, 0.58)]
)
def test_beams_distort_the_text(m: int, k: int, chunks: int, far: float) -> None:
    """By enumeration the text's distribution is not the model's, and it is what keys draw."""
    texts, model = by_enumeration(m, k, chunks), CHAIN.text_distribution(k * chunks)
    assert distance(texts, model) > far
    drawn = []
    for trial in range(1200):
        prg = Prg.from_seed(trial, f"beams {m} {k}")
        embedder = Embedder((key_of(trial),), Scheme(3), ChainBeams(), TokenUnits(), m, k, prg=prg)
        drawn.append(embedder.text((0,), k * chunks).content)
    assert p_value(drawn, texts) > FALSE_ALARM
    assert p_value(drawn, {**dict.fromkeys(texts, 0.0), **model}) < FALSE_ALARM


def test_as_many_beams_as_texts_are_no_model_either() -> None:
    """All three tokens are candidates, and a key chooses each as often."""
    texts = by_enumeration(3, 1, 2)
    assert {round(p, 12) for p in texts.values()} == {round(1 / 9, 12)}
    assert distance(texts, CHAIN.text_distribution(2)) == pytest.approx(0.29667, abs=1e-4)


@pytest.fixture(scope="module")
def public() -> tuple[Tokenizer, dict[str, object]]:
    directory = shipped("public")
    config, weights = load_folded(directory)
    return Tokenizer.load(directory), {
        "config": config,
        "weights": weights,
        "ends": frozenset(),
        "sampling": Sampling(0.8),
    }


def test_beams_of_a_model_are_its_likeliest_texts(
    public: tuple[Tokenizer, dict[str, object]],
) -> None:
    """Against a search that computes every distribution anew."""
    tokenizer, model = public
    prompt = tuple(tokenizer.encode("def read(path):"))
    plain, beams = ModelSampler(**model), BeamSampler(**model)  # type: ignore[arg-type]
    p = plain.distribution(prompt)
    single = beams.sample(prompt, 5, 1)
    assert [one.content for one in single] == [(int(t),) for t in np.argsort(-p)[:5]]
    total = {(): 0.0}
    for _ in range(3):
        longer = {
            (*text, token): log_p + float(after)
            for text, log_p in total.items()
            for token, after in enumerate(np.log(plain.distribution((*prompt, *text))))
        }
        total = dict(sorted(longer.items(), key=lambda one: -one[1])[:4])
    assert [one.content for one in beams.sample(prompt, 4, 3)] == list(total)
    with pytest.raises(InputError, match="do not fit"):
        beams.sample(prompt, 2, 1000)


def test_a_paraphraser_rewrites_blocks_of_a_sample(
    public: tuple[Tokenizer, dict[str, object]],
) -> None:
    tokenizer, model = public
    prompt = tuple(tokenizer.encode("def read(path):"))
    cheaper = ModelSampler(**model, prg=Prg.from_seed(1, "cheaper"))  # type: ignore[arg-type]
    sample = tuple(range(40, 52))

    class One:
        def sample(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
            assert n == 1
            return [Drawn(sample[:max_tokens], max_tokens < 12)]

    rewriter = Rewriter(One(), cheaper, Prg.from_seed(2, "blocks"))
    drawn = rewriter.sample(prompt, 64, 12)
    assert {len(one.content) for one in drawn} == {12} and not any(one.ended for one in drawn)
    # A block is the sample's as a whole, in half of the cases, or drawn.
    kept = [
        tuple(one.content[i : i + BLOCK]) == sample[i : i + BLOCK]
        for one in drawn
        for i in range(0, 12, BLOCK)
    ]
    assert abs(np.mean(kept) - 0.5) < 5 * 0.5 / np.sqrt(len(kept))
    assert rewriter.sample(prompt, 3, 0) == [Drawn((), True)] * 3
    assert all(one.ended for one in rewriter.sample(prompt, 3, 6))
    every = Rewriter(One(), cheaper, Prg.from_seed(3, "blocks"), share=1.0)
    nothing = Rewriter(One(), cheaper, Prg.from_seed(3, "blocks"), share=0.0)
    assert {one.content for one in nothing.sample(prompt, 3, 12)} == {sample}
    assert sample not in {one.content for one in every.sample(prompt, 3, 12)}


def test_given_tokens_are_kept_and_others_follow_them(
    public: tuple[Tokenizer, dict[str, object]],
) -> None:
    """A token that is drawn after given ones has the distribution after them."""
    tokenizer, model = public
    prompt = tuple(tokenizer.encode("import "))
    sampler = ModelSampler(**model, prg=Prg.from_seed(4, "given"))  # type: ignore[arg-type]
    given = np.array([[ANY, 50, ANY]] * 600)
    made = [one.content for one in sampler.completed(prompt, given)]
    assert {text[1] for text in made} == {50}
    first = sampler.distribution(prompt)
    assert p_value([text[0] for text in made], dict(enumerate(first.tolist()))) > FALSE_ALARM
    likeliest = int(first.argmax())
    same = [text[2] for text in made if text[0] == likeliest]
    after = sampler.distribution((*prompt, likeliest, 50))
    assert len(same) > 30
    assert p_value(same, dict(enumerate(after.tolist()))) > FALSE_ALARM


def test_what_has_ended_is_left_as_it_is() -> None:
    def nobody(parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        raise AssertionError("a beam that has ended does not go on")

    first = np.log([0.1, 0.9])
    assert beam_search(first, nobody, 1, 3, frozenset({1})) == [Drawn((), True)]
