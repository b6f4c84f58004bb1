"""The study of watermarks: its figures against oracles, its texts against the package's own way to
write them, what edits and forgers do, and how a result is shown.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.common import commands
from experiments.watermark import command as watermark
from experiments.watermark import edits, forgery, metrics, scores
from experiments.watermark import plan as watermark_plan
from experiments.watermark import report as watermark_report
from experiments.watermark import study as watermark_study
from experiments.watermark.plan import (
    CHUNKED,
    MARK,
    RACE,
    RANDOM,
    WatermarkCell,
    WatermarkPlan,
    cells,
)
from experiments.watermark.texts import Author, Lanes, Method, distribution_of, draws, write
from models.hf import load_folded
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling
from spu_llm.app import cli
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.cdfs import Family
from spu_llm.systems.watermark.embedding import Embedder
from spu_llm.systems.watermark.history import History
from spu_llm.systems.watermark.keys import Scheme
from spu_llm.systems.watermark.model_sampler import ModelSampler
from spu_llm.systems.watermark.race_marks import MarkedNoise, race_text
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.units import TokenUnits

# ---- figures


def test_areas_of_known_curves() -> None:
    """True positives are the root of false ones: areas 2/3, and (2/3) 0.01^1.5 up to 1 %, which
    standardised is 0.530988.
    """
    grid = (np.arange(40_000) + 0.5) / 40_000
    others, marked = -grid, -(grid**2)
    assert metrics.auc(marked, others) == pytest.approx(2 / 3, abs=1e-4)
    assert metrics.partial_auc(marked, others) == pytest.approx(0.530988, abs=2e-4)
    assert metrics.true_positives(marked, others) == pytest.approx(0.1, abs=1e-3)
    assert metrics.partial_auc(others, others) == pytest.approx(0.5, abs=1e-4)
    # Nothing is at chance or perfect by accident of ties.
    assert metrics.auc(np.ones(5), np.ones(7)) == 0.5
    assert metrics.partial_auc(np.ones(5), np.ones(7)) == pytest.approx(0.5)
    assert metrics.partial_auc(np.ones(5), np.zeros(7)) == metrics.auc(np.ones(5), np.zeros(7)) == 1


def test_areas_by_counting_pairs() -> None:
    source = np.random.default_rng(1)
    marked, others = source.integers(0, 9, 40) + 2.0, source.integers(0, 9, 60) * 1.0
    pairs = [(a > b) + (a == b) / 2 for a in marked for b in others]
    assert metrics.auc(marked, others) == pytest.approx(np.mean(pairs))
    # The whole area as a partial one: standardised it is the same.
    assert metrics.partial_auc(marked, others, 1.0) == pytest.approx(np.mean(pairs))


def test_intervals_are_by_prompt() -> None:
    """Rows of a prompt that are all alike are one observation, not ten."""
    source = np.random.default_rng(2)
    values = source.normal(size=60)
    value, low, high = metrics.mean(values)
    assert value == pytest.approx(values.mean(), abs=1e-4)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / np.sqrt(60), rel=0.1)
    marked, others = values[:, None] + 0.5, source.normal(size=(60, 1))
    one = metrics.by_prompt(metrics.auc, marked, others)
    ten = metrics.by_prompt(metrics.auc, np.repeat(marked, 10, 1), np.repeat(others, 10, 1))
    assert one == ten and one[2] - one[1] > 0.1
    assert metrics.ratio(np.full(4, 6.0), np.full(4, 3.0)) == [2.0, 2.0, 2.0]
    same = metrics.difference_of_ratios(values, values + 9, values, values + 9)
    assert same == [0.0, 0.0, 0.0]


def test_steps_of_drafts() -> None:
    """By hand: a step ends with the first draft that differs, or after all, and one token more."""
    matched = np.array([True, True, False, True, True, True, False, False])
    assert watermark_study.steps_of(matched, 0) == 8
    assert watermark_study.steps_of(matched, 1) == 5
    assert watermark_study.steps_of(matched, 2) == 4
    assert watermark_study.steps_of(matched, 4) == 3
    assert watermark_study.steps_of(np.ones(9, bool), 2) == 3
    assert watermark_study.steps_of(np.zeros(9, bool), 2) == 9


# ---- texts


@pytest.fixture(scope="module")
def pair(tiny_pair: tuple[Path, Path]) -> tuple[Lanes, Lanes, Tokenizer]:
    private, public = (Lanes(directory, 40) for directory in tiny_pair)
    return private, public, Tokenizer.load(tiny_pair[0])


PROMPTS = np.array([[5, 6, 7], [9, 8, 7], [100, 5, 5]], np.int32)


def authors(method: Method) -> list[Author]:
    return [Author.of(method, 0, f"test {j}") for j in range(len(PROMPTS))]


def test_lanes_are_the_model(
    pair: tuple[Lanes, Lanes, Tokenizer], tiny_pair: tuple[Path, Path]
) -> None:
    """Side by side, in any order, what the sampler of one text says."""
    lanes = pair[0]
    config, weights = load_folded(tiny_pair[0])
    one = ModelSampler(config, weights, frozenset(), Sampling(0.7))
    state = lanes.after(lanes.begun(PROMPTS), np.array([1, 2, 3]))
    state = lanes.after(lanes.picked(state, np.array([2, 0, 2])), np.array([4, 5, 6]))
    distribution = distribution_of(state.logits, 0.7, [])
    for lane, text in enumerate([(*PROMPTS[2], 3, 4), (*PROMPTS[0], 1, 5), (*PROMPTS[2], 3, 6)]):
        expected = one.distribution(tuple(map(int, text)))
        assert distribution.p[lane] == pytest.approx(expected, rel=1e-3, abs=1e-7)
        entropy = -(expected * np.log(expected)).sum()
        assert distribution.entropy[lane] == pytest.approx(entropy, rel=1e-3)
    assert (distribution_of(state.logits, 0.7, [0, 9]).p[:, [0, 9]] == 0).all()


class Alone:
    """The distribution of one text by itself."""

    def __init__(self, lanes: Lanes, prompt: np.ndarray, prg: Prg, temperature: float) -> None:
        self.lanes, self.prompt, self.prg, self.temperature = lanes, prompt, prg, temperature

    def distribution(self, prefix: Any) -> np.ndarray:
        state = self.lanes.begun(self.prompt[None])
        for token in prefix[len(self.prompt) :]:
            state = self.lanes.after(state, np.array([token]))
        return distribution_of(state.logits, self.temperature, [0]).p[0]


def test_texts_are_those_of_the_package(pair: tuple[Lanes, Lanes, Tokenizer]) -> None:
    """Some candidates and all of them: `Embedder`. Race: `race_text`."""
    lanes = pair[0]
    method = Method("white-box")
    written = write(method, authors(method), lanes, PROMPTS, 6, 0.8, [0])
    raced = write(
        replace(RACE, history=True),
        authors(replace(RACE, history=True)),
        lanes,
        PROMPTS,
        6,
        0.8,
        [0],
        pair[1],
    )
    for j, author in enumerate(authors(method)):
        distribution = Alone(lanes, PROMPTS[j], author.prg, 0.8)
        embedder = Embedder(
            author.keys, Scheme(4), distribution, TokenUnits(), 2, 1, (History(False),)
        )
        embedder.m = None
        embedder.sampler = ModelLike(distribution)  # type: ignore[assignment]
        prompt = tuple(map(int, PROMPTS[j]))
        assert embedder.text(prompt, 6).content == tuple(written.tokens[j])
        noise = MarkedNoise(author.keys[0], 4, lanes.config.vocab_size, History(), author.prg)
        tokens, _ = race_text(distribution.distribution, noise, prompt, 6, frozenset())
        assert tokens == tuple(raced.tokens[j])
        flat = Method("flat", 3)
        marked = write(flat, authors(flat)[j : j + 1], lanes, PROMPTS[j : j + 1], 6, 0.8, [0])
        again = authors(flat)[j]
        embedder = Embedder(
            again.keys,
            Scheme(4),
            Candidates(distribution, again.prg),
            TokenUnits(),
            3,
            1,
            (History(False),),
            again.prg,
        )
        assert embedder.text(prompt, 6).content == tuple(marked.tokens[0])
    assert raced.matched.shape == raced.overlap.shape == (3, 6)
    assert (raced.overlap > 0).all() and (raced.overlap <= 1).all()


class Candidates:
    """Independent draws of a distribution, in the order in which the study draws them."""

    def __init__(self, distribution: Alone, prg: Prg) -> None:
        self.alone, self.prg = distribution, prg

    def sample(self, prefix: Any, n: int, max_tokens: int) -> list[Drawn]:
        points = self.prg.uniform((n,))
        return [Drawn((t,), False) for t in draws(self.alone.distribution(prefix), points)]


class ModelLike(ModelSampler):
    def __init__(self, distribution: Alone) -> None:
        self.alone, self.ends = distribution, frozenset()

    def distribution(self, prefix: Any) -> np.ndarray:
        return self.alone.distribution(prefix)


@pytest.mark.parametrize(
    "method",
    [
        Method("flat", 4),
        Method("flat", 2, 3, history=True),
        Method("recursive", 2, keys=2),
        Method("aaronson"),
        Method("kirchenbauer", delta=2.0),
        Method("kuditipudi"),
    ],
)
def test_texts_come_again_and_each_is_found(
    method: Method, pair: tuple[Lanes, Lanes, Tokenizer]
) -> None:
    """The same seeds, the same texts; 30 tokens score above those under other keys."""
    lanes, _, tokenizer = pair
    written = write(method, authors(method), lanes, PROMPTS, 30, 1.0, [0])
    again = write(method, authors(method), lanes, PROMPTS, 30, 1.0, [0])
    assert np.array_equal(written.tokens, again.tokens)
    assert written.tokens.shape == written.nats.shape == written.entropy.shape == (3, 30)
    texts = [[int(t) for t in row] for row in written.tokens]
    plain = write(RANDOM, authors(RANDOM), lanes, PROMPTS, 30, 1.0, [0])
    nulls = scores.Nulls([[row.tolist()] for row in plain.tokens], 8, tokenizer.vocab_size, 0)
    (kind, *_) = scores.KINDS[method.name]
    own = scores.scores_of(method, kind, authors(method), texts, [30], nulls, tokenizer.vocab_size)
    assert metrics.auc(own.ravel(), nulls.scores(kind, 30).ravel()) > 0.7
    # A second text of an author is another one, but for Aaronson's.
    others = [author.again() for author in authors(method)]
    second = write(method, others, lanes, PROMPTS, 30, 1.0, [0])
    assert np.array_equal(second.tokens, written.tokens) == (method.name == "aaronson")


def test_scores_of_unmarked_texts_are_p_values() -> None:
    """Mean of p within six deviations of a half, for every kind that has p."""
    source = np.random.default_rng(3)
    texts = [[source.integers(1, 200, 40).tolist()] for _ in range(60)]
    nulls = scores.Nulls(texts, 3, 200, 0)
    for kind in scores.P_VALUES:
        p = 10.0 ** -nulls.scores(kind, 30)
        assert abs(p.mean() - 0.5) < 6 / np.sqrt(12 * p.size / (2 if kind == "recursive" else 1))
    aligned = nulls.scores("alignment", 30)
    assert aligned.mean() == pytest.approx(0, abs=1e-9) and aligned.shape == (60, 2)


# ---- edits


def test_edits_change_as_many_tokens_as_they_say() -> None:
    text = list(range(1000, 1100))
    for name, edit in edits.EDITS.items():
        actual, again = (edit(text, 500, Prg.from_seed(1, name)) for _ in range(2))
        kept = [token for token in actual if token >= 1000]
        assert actual == again and kept == sorted(kept) and 0 not in actual
        share = int(name.split()[1]) if "%" in name else 0
        if "replaced" in name:
            assert len(actual) == 100 and len(kept) == 100 - share
        elif "deleted" in name:
            assert len(actual) == len(kept) == 100 - share
        elif "inserted" in name:
            assert len(actual) == 100 + share and len(kept) == 100
        else:
            assert actual == text[25:75]


def test_the_paraphraser_rewrites_blocks_and_comes_again(
    pair: tuple[Lanes, Lanes, Tokenizer],
) -> None:
    texts = np.tile(np.arange(10, 34), (3, 1))

    def made(share: float, seed: int = 0) -> np.ndarray:
        prg = Prg.from_seed(seed, "paraphrase")
        return edits.paraphrased(texts, PROMPTS, share, pair[1], [0], prg)

    assert np.array_equal(made(0.0), texts)
    half = made(0.5)
    assert np.array_equal(half, made(0.5)) and not np.array_equal(half, made(0.5, 1))
    changed = (half != texts).reshape(3, -1, edits.BLOCK)
    blocks = changed.any(axis=2)
    assert 3 < blocks.sum() < 15 and changed[blocks].mean() > 0.9
    assert (made(1.0) != texts).mean() > 0.9 and (made(1.0) > 0).all()


# ---- forgery


def test_forgers_write_what_they_have_seen() -> None:
    source = np.random.default_rng(4)
    texts = source.integers(1, 12, (5, 60)).tolist()
    seen = set(forgery._grams(texts, 4))
    walked = forgery.walk(texts, 80, Prg.from_seed(0, "walk"))
    pasted = forgery.paste(texts, 80, Prg.from_seed(0, "paste"))
    assert len(walked) == len(pasted) == 80
    copied = [sum(g in seen for g in forgery._grams([t], 4)) for t in (walked, pasted)]
    assert copied[0] > 60 and copied[1] >= 5 * 10
    assert walked == forgery.walk(texts, 80, Prg.from_seed(0, "walk"))


def test_guesses_are_better_than_chance_of_seen_n_grams_alone() -> None:
    """Texts that keep of 4 tokens the one with the largest number: .8 of seen n-grams."""
    source = np.random.default_rng(5)
    key = authors(MARK)[0].keys[0]
    marked = []
    for _ in range(30):
        text: list[int] = []
        for _ in range(60):
            drawn = source.integers(1, 300, 4).tolist()
            text.append(max(drawn, key=lambda t: forgery.number(key, (*text[-3:], t))))
        marked.append(text)
    unmarked, others = (source.integers(1, 300, (30, 60)).tolist() for _ in range(2))
    actual = forgery.guesses(marked, unmarked, others, key, Prg.from_seed(0, "guess"))
    seen, unseen = actual["seen"], actual["unseen"]
    assert abs(seen["right"] - 0.8) < 6 * np.sqrt(0.16 / seen["pairs"])
    assert abs(unseen["right"] - 0.5) < 6 * np.sqrt(0.25 / unseen["pairs"])
    assert seen["pairs"] > 1500 and unseen["pairs"] > 1500


# ---- the study


def test_cells_go_on_where_they_ended(tmp_path: Path) -> None:
    plan = WatermarkPlan(texts=4)
    actual = cells(plan)
    assert len({cell.name for cell in actual}) == len(actual)
    rows = [{"temperature": cell.temperature, **asdict(cell.method)} for cell in actual]
    again = json.loads(json.dumps(rows))
    assert [watermark_plan.cell_of(row).name for row in again] == [cell.name for cell in actual]
    file = tmp_path / "found.json"
    assert commands.earlier(file, plan) == []
    file.write_text(json.dumps({"plan": asdict(plan), "rows": rows[:2]}))
    assert commands.earlier(file, plan) == again[:2]
    with pytest.raises(InputError, match="no cells of this very plan"):
        commands.earlier(file, replace(plan, texts=5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--texts", "3"], "--texts must be at least 4"),
        (["--tokens", "20"], "--tokens must be at least 30"),
        (["--temperatures", "0"], "--temperatures must be 0.05 to 5"),
        (["--tokens", "41"], "--tokens must be 40 or fewer"),
        (["--texts", "99"], "--texts must be"),
    ],
)
def test_nonsense_is_refused(
    options: list[str], words: str, tiny_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["--model", str(tiny_pair[0]), "--draft-model", str(tiny_pair[1])]
    with pytest.raises(SystemExit) as end:
        cli.main(["experiment", "watermark", *models, *options])
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_measures_a_tiny_model(
    tmp_path: Path,
    tiny_pair: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One cell of each kind; what is there is not measured again."""
    kinds = (
        RANDOM,
        replace(MARK, history=True),
        MARK,
        Method("plain-race"),
        replace(RACE, history=True),
        replace(CHUNKED, k=5),
        Method("forgery", 16),
    )
    monkeypatch.setattr(
        watermark, "cells", lambda plan: [WatermarkCell(1.0, kind) for kind in kinds]
    )
    for module in (metrics, watermark_study):
        monkeypatch.setattr(module, "ROUNDS", 2)
    monkeypatch.setattr(watermark_study, "SCORED", ())
    file, picture = tmp_path / "found.json", tmp_path / "figure.png"
    arguments = [
        "experiment",
        "watermark",
        "--model",
        str(tiny_pair[0]),
        "--draft-model",
        str(tiny_pair[1]),
        "--texts",
        "4",
        "--tokens",
        "30",
        "--temperatures",
        "1",
        "--json",
        str(file),
        "--plot",
        str(picture),
    ]

    def run() -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert not end.value.code
        return capsys.readouterr().out

    printed = run()
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = {(row["name"], row["history"]): row for row in result["rows"] if row["k"] == 1}
    assert len(result["rows"]) == len(kinds) and picture.stat().st_size > 1000
    mark = rows["flat", False]
    assert mark["texts"] == 4 and 0 <= mark["detection"]["sum"]["pooled"]["auc"][0] <= 1
    assert len(mark["detection"]["sum"]["edited"]) == len(edits.EDITS) + 2
    assert mark["shift"][1] <= mark["shift"][0] <= mark["shift"][2]
    race = rows["race", True]["drafts"]
    assert 1 <= race["2"][0] <= 3 and 1 <= race["4"][0] <= 5
    assert len(rows["forgery", False]["forged"]) == 2 * (2 + 2 + 1)
    assert "| flat, k = 1, m = 16, history |" in printed and "criterion AUC" not in printed
    before = file.read_bytes()
    assert run() == printed and file.read_bytes() == before


# ---- the report


def interval(value: float, half: float = 0.01) -> list[float]:
    return [value, value - half, value + half]


def made_up(method: Method, auc: float = 0.98, shift: float = 0.0, **more: Any) -> dict[str, Any]:
    collected = {"auc": interval(auc), "pauc": interval(0.8), "tpr": interval(0.7)}
    kinds = scores.KINDS.get(method.name, ())
    detection = {
        kind: {
            "by_length": {n: collected for n in watermark_report.LENGTHS},
            "pooled": collected,
            "edited": {"replaced 10 %": collected, "paraphrased 50 %": collected},
            "scores": "1 2",
            "median": 5.25,
        }
        for kind in kinds
    }
    same = {"tokens": 10, "chunk": interval(0.5), "text": interval(0.0), "common": interval(1.5)}
    return {
        "temperature": 1.0,
        **asdict(method),
        "texts": 2,
        "tokens": 150,
        "bits": interval(5.0),
        "nats": interval(3.5),
        "shift": interval(shift),
        "excess_bits": interval(0.0),
        "agreement": same,
        **({"detection": detection} if kinds else {}),
        **more,
    }


def drafts(steps: str) -> dict[str, Any]:
    return {
        "drafts": {
            "accepted": interval(0.7),
            "overlap": interval(0.7),
            **{n: interval(2.0) for n in ("2", "4")},
            **{f"{n} by text": steps for n in ("2", "4")},
        }
    }


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    calibration = {"sum": {"count": 9, "at_1": interval(0.01), "at_5": interval(0.05)}}
    unmarked = made_up(RANDOM, calibration=calibration)
    return {"plan": asdict(WatermarkPlan(texts=2)), "rows": [unmarked, *rows]}


def test_tables_show_the_figures() -> None:
    history = replace(RACE, history=True)
    of = result(
        made_up(MARK, 0.984, 0.02),
        made_up(Method("aaronson")),
        made_up(Method("plain-race"), **drafts("60 70")),
        made_up(history, **drafts("60 70")),
    )
    text = watermark_report.table(of)
    assert "+2.0 % (+1.0 to +3.0) | +0.000 (-0.010 to +0.010) | 50 (49 to 51)" in text
    assert "| flat, k = 1, m = 16 | 98.4 | 98.4 | 98.4 (97.4 to 99.4) | 80.0 (79.0 to" in text
    assert "| Aaronson, as published | 98.0 |" in text and "Aaronson, corrected" in text
    assert "| race, one sample, history, temperature 1 | 5.2 | 70.0 (69.0 to 71.0) |" in text
    assert "1.00 % (0.00 to 2.00) of 9 scores with p of 0.01 or less" in text
    paragraphs = watermark_report.in_results(of, "*origin*")
    assert paragraphs.count("*origin*") == 4


def test_lengths_that_texts_do_not_have_are_dashes() -> None:
    of = result(made_up(MARK))
    scores_of = of["rows"][1]["detection"]["sum"]
    scores_of["by_length"] = {"25": scores_of["by_length"]["25"]}
    head, _, row = watermark_report.detection(of, 1.0)
    assert head.count("|") == row.count("|") and "| 98.0 | – | 98.0 (97.0 to 99.0) |" in row
    assert "| 98.0 / 80.0 | – | – | – | – |" in watermark_report.by_length(of)[-1]


def test_criteria_go_by_the_figures() -> None:
    on = replace(MARK, history=True)
    plain = made_up(Method("plain-race"), **drafts("60 70"))

    def said(*rows: dict[str, Any]) -> list[str]:
        return [line.rpartition(": ")[2] for line in watermark_report.criteria(result(*rows))]

    assert said(made_up(on)) == ["holds", "holds"]
    assert said(made_up(on, 0.969)) == ["does not hold", "holds"]
    assert (
        said(made_up(on, shift=0.02))
        == said(made_up(on, shift=-0.02))
        == ["holds", "does not hold"]
    )
    assert said(made_up(MARK, shift=0.02)) == ["holds"]
    same = replace(RACE, history=True)
    assert said(plain, made_up(same, **drafts("60 70"))) == ["holds"]
    assert said(plain, made_up(same, **drafts("70 80"))) == ["does not hold"]
    # Text of less than a bit a token is outside of what is asked.
    few = result(made_up(on))
    few["rows"][0]["bits"] = interval(0.9)
    assert watermark_report.criteria(few) == []


def test_families_score_by_the_package() -> None:
    """A score is -log10 p of the numbers of distinct n-grams."""
    pairs = [(b"a", 0.9), (b"b", 0.8), (b"a", 0.9)]
    assert scores.distinct(pairs).tolist() == [0.9, 0.8]
    value = scores.score("sum", pairs, Family())
    assert value == pytest.approx(-np.log10(1 - (1 - 0.3**2 / 2)))
    assert [m.uniform for m in scores.marks_of(pairs)] == [0.9, 0.8, None]
