"""The baselines: their charges as published and corrected, and what they draw."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting.privacy_accountant import UnsupportedEventError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.accounting import epsilon_of, rho_for, total
from spu_llm.systems.dp_text.baselines import adapmixed, amin, augpe
from spu_llm.systems.dp_text.corpus import METHODS, CorpusRequest, augpe_for, method_for
from spu_llm.systems.dp_text.lanes import folded
from spu_llm.systems.dp_text.methods import Method
from spu_llm.systems.dp_text.prompts import prompts_for
from tests.kit.models import PRIVATE, endless, save_tokenizer, tiny_params

DELTA = 1e-6
INF = None
# Clip norms of Amin et al. at tau 1: by epsilon, for B = 31, 63, 127.
TABLE_2 = {
    1.0: [INF, INF, INF],
    3.0: [INF, INF, 3.906],
    5.0: [INF, INF, 10.244],
    10.0: [INF, 8.817, 21.263],
}


# ---- Amin et al.


@pytest.mark.parametrize("batch, rho", [(31, 2.3124), (63, 0.5599), (127, 0.1378)])
def test_what_the_test_of_amin_takes(batch: int, rho: float) -> None:
    assert 100 * amin.published_test_rho(batch) == pytest.approx(rho, abs=5e-5)


@pytest.mark.parametrize("epsilon", TABLE_2)
def test_where_amin_is_infeasible(epsilon: float) -> None:
    for batch, expected in zip((31, 63, 127), TABLE_2[epsilon], strict=True):
        actual = amin.published_clip(rho_for(epsilon, DELTA), batch, 1.0)
        assert (actual is None) == (expected is None)
        if expected is not None:
            assert actual == pytest.approx(expected, abs=6e-4)


def test_amin_as_published_is_refused_where_infeasible() -> None:
    wanted = CorpusRequest("amin-published", 10.0, DELTA, 31, 1, 500)
    with pytest.raises(InputError, match="infeasible at epsilon 10 with a batch of 31"):
        method_for(wanted)
    actual = method_for(replace(wanted, batch=127))
    assert "no guarantee" in actual.guarantee
    with pytest.raises(UnsupportedEventError):
        total([actual.event], "replace-by-null")


@pytest.mark.parametrize("adjacency", ["replace-by-null", "zero-out", "replace-one"])
@pytest.mark.parametrize("batch", [8, 127])
def test_amin_corrected_spends_its_budget(batch: int, adjacency: str) -> None:
    actual = method_for(
        CorpusRequest("amin", 10.0, DELTA, batch, 1, 500, temperature=1.2, adjacency=adjacency)
    )
    spent = total([actual.event], adjacency).get_epsilon(DELTA)
    assert 10 * (1 - 1e-6) <= spent <= 10


def test_a_softmax_moves_further_than_amin_charges_for() -> None:
    """Logits moved by Delta move it by 2 tanh(Delta / 2) in L1, attained at equal halves; for C = 4
    that is four times 1 / B.
    """
    batch, clip = 8, 4.0
    moved = clip / batch

    def softmax(x: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(x) / np.exp(x).sum())

    worst = np.abs(softmax(np.array([-moved, moved])) - softmax(np.zeros(2))).sum()
    halves = np.abs(
        softmax(np.array([moved / 2, -moved / 2])) - softmax(np.array([-moved / 2, moved / 2]))
    ).sum()
    assert worst <= 2 * math.tanh(moved) and worst > 3 / batch
    assert halves == pytest.approx(2 * math.tanh(moved / 2)) and halves > 3 / batch


@given(arrays.arrays(np.float32, (4, 6), elements=st.floats(-40, 40, width=32)), st.floats(0.1, 20))
def test_amin_s_mean_moves_by_no_more_than_c_over_b(rows: np.ndarray, clip: float) -> None:
    there, gone = np.ones(4, bool), np.array([False, True, True, True])
    change = amin.mean_clipped(rows, there, clip) - amin.mean_clipped(rows, gone, clip)
    assert np.abs(change).max() <= clip / 4 * (1 + 1e-12)


def tokens_of(method: Method, public: Any, private: Any, count: int, seed: int = 0) -> list[Any]:
    token = method.begin(np.ones(len(private), bool), Prg.from_seed(seed, "baseline"))
    return [token(public, private) for _ in range(count)]


def test_amin_reads_references_only_where_they_differ() -> None:
    public = np.array([8.0, 0, 0, 0], np.float32)
    settings = amin.Amin(8, 10.0, 500, private_tokens=5)
    method = amin.method(settings, "amin", None)  # type: ignore[arg-type]
    same, other = np.tile(public, (8, 1)), np.tile(np.array([0, 0, 0, 8.0], np.float32), (8, 1))
    # Alike, it goes on with the public model; unlike, T_prv private tokens are all.
    quiet = tokens_of(method, public, same, 100)
    assert quiet.count(0) + quiet.count(None) == 100 and quiet.count(None) < 50
    loud = tokens_of(method, public, other, 100)
    assert loud.count(3) == 5 and loud[-1] is None and loud.count(None) > 50


# ---- AdaPMixED


def test_adapmixed_s_figures() -> None:
    assert adapmixed.epsilon_after(0.0, 15.0, DELTA) == pytest.approx(0.72440, abs=5e-6)
    settings = adapmixed.AdaPMixED(10.0, DELTA, 7, 100)
    assert settings.screening_charge == pytest.approx(3.061e-5, rel=1e-4)


def test_divergence_is_the_formulas_and_of_the_worse_side() -> None:
    p, q, alpha = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), 3.0

    def one(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.log(np.sum(a**alpha * b ** (1 - alpha))) / (alpha - 1))

    assert adapmixed.divergence(p, q, alpha) == pytest.approx(max(one(p, q), one(q, p)))
    assert adapmixed.divergence(p, p, alpha) == pytest.approx(0, abs=1e-15)


def test_mixing_weights_are_the_largest_that_fit() -> None:
    public = np.array([0.5, 0.3, 0.2])
    private = np.array([[0.5, 0.3, 0.2], [0.45, 0.35, 0.2], [0.001, 0.001, 0.998]])
    limit, alpha = 0.1, 15.0
    actual = adapmixed.mixing_weights(public, private, limit, alpha)
    assert actual[0] == actual[1] == 1 and 0 < actual[2] < 1
    for step, meets in ((0.0, True), (1e-6, False)):
        w = actual[2] + step
        mixed = w * private[2] + (1 - w) * public
        assert (adapmixed.divergence(public, mixed, alpha) <= limit) == meets
    # The authors' program leaves out whoever agrees.
    published = adapmixed.mixing_weights(public, private, limit, alpha, published=True)
    assert published[0] == published[1] == 0 and published[2] == actual[2]


def test_what_is_left_without_a_reference() -> None:
    mixed, public = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([0.6, 0.4])
    np.testing.assert_allclose(adapmixed.without(mixed, public, True), [[0.75, 0.25], [0.55, 0.45]])
    np.testing.assert_allclose(adapmixed.without(mixed, public, False), [[0.9, 0.1], [0.5, 0.5]])
    assert adapmixed.without(mixed[:1], public, False).tolist() == [public.tolist()]


def test_adapmixed_never_goes_past_its_target() -> None:
    source = np.random.default_rng(0)
    public = source.normal(size=80).astype(np.float32)
    private = public + source.normal(size=(4, 80)).astype(np.float32)
    actual = method_for(CorpusRequest("adapmixed", 3.0, DELTA, 4, 1, 1000))
    drawn = tokens_of(actual, public, private, 200)
    assert drawn[0] is not None and drawn[-1] is None
    state = actual.begin(np.ones(4, bool), Prg.from_seed(1, "a")).__self__  # type: ignore[attr-defined]
    while state.token(public, private) is not None:
        assert adapmixed.epsilon_after(state.charges, 15.0, DELTA) <= 3.0
    with pytest.raises(UnsupportedEventError):
        total([actual.event], "replace-by-null")


# ---- AugPE


@pytest.mark.parametrize("adjacency, change", [("replace-by-null", 1), ("replace-one", 2**0.5)])
def test_votes_move_by_what_is_charged(adjacency: str, change: float) -> None:
    source = np.random.default_rng(0)
    candidates, references = source.normal(size=(5, 4)), source.normal(size=(9, 4))
    there = np.ones(9, bool)
    actual = augpe.votes(candidates, references, there)
    assert actual.sum() == 9
    if adjacency == "replace-one":
        others = augpe.votes(candidates, np.concatenate([-references[:1], references[1:]]), there)
    else:
        others = augpe.votes(candidates, references, np.arange(9) > 0)
    assert np.linalg.norm(actual - others) == pytest.approx(change) == augpe.SENSITIVITY[adjacency]
    assert not augpe.votes(candidates, references, ~there).any()


def test_a_null_reference_moves_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others are computed in the rows that they had: products may round otherwise elsewhere."""
    save_tokenizer(tmp_path)
    prompts = prompts_for(Tokenizer.load(tmp_path), "def read(", 64, 4, 16)
    weights = folded(PRIVATE, endless(tiny_params(PRIVATE, 1)))
    settings = augpe_for(CorpusRequest("augpe", 1.0, DELTA, 8, 1, 4))
    rows: list[np.ndarray] = []
    votes = augpe.votes

    def watched(candidates: np.ndarray, references: np.ndarray, *more: Any) -> np.ndarray:
        rows.append(references)
        return votes(candidates, references, *more)

    monkeypatch.setattr(augpe, "votes", watched)
    for first in ("alpha beta", ""):
        augpe.corpus(
            replace(settings, iterations=1, variations=1),
            PRIVATE,
            weights,
            prompts,
            [first, "gamma delta", "x"],
            1,
            Prg.from_seed(1, "augpe"),
        )
    there, gone = rows
    assert there.shape == gone.shape and there[1:].tobytes() == gone[1:].tobytes()


@pytest.mark.parametrize("adjacency", ["replace-by-null", "zero-out", "replace-one"])
@pytest.mark.parametrize("epsilon", [1.0, 10.0])
def test_augpe_spends_its_budget(epsilon: float, adjacency: str) -> None:
    actual = augpe_for(CorpusRequest("augpe", epsilon, DELTA, 8, 3, 20, adjacency=adjacency))
    spent = total([actual.event], adjacency)
    assert spent.rho == pytest.approx(
        actual.iterations * augpe.SENSITIVITY[adjacency] ** 2 / (2 * actual.noise**2)
    )
    assert epsilon * (1 - 1e-6) <= spent.get_epsilon(DELTA) <= epsilon


# ---- by name


@pytest.mark.parametrize("name", [name for name in METHODS if name != "augpe"])
def test_methods_by_name(name: str) -> None:
    wanted = CorpusRequest(name, 10.0, DELTA, 64, 1, 50, top_k=20)
    actual = method_for(wanted)
    assert (actual.name, actual.batch, actual.max_new_tokens) == (name, 64, 50)
    if name in ("invisibleink", "full-vocabulary", "amin"):
        spent = epsilon_of(total([actual.event], "replace-by-null").rho, DELTA)
        assert 10 * (1 - 1e-6) <= spent <= 10
    if name != "public-only":
        with pytest.raises(InputError, match="needs --epsilon"):
            method_for(replace(wanted, epsilon=None))
    if name not in ("invisibleink", "full-vocabulary"):
        with pytest.raises(InputError, match="--centre"):
            method_for(replace(wanted, centre=True))


def test_no_other_method() -> None:
    with pytest.raises(InputError, match="choose from invisibleink, full-vocabulary"):
        method_for(CorpusRequest("nobody", 1.0, DELTA, 8, 1, 10))
