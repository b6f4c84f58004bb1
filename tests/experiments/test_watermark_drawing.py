"""Ways to draw candidates: each keeps the model's distribution, and does what its name says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.watermark import drawing as watermark_drawing
from experiments.watermark.drawing import FITTED_K, FITTED_M, SPREAD, Way, table, write
from experiments.watermark.texts import Author, Method, State
from spu_llm.app import cli
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from tests.systems.watermark.chains import FALSE_ALARM, NEXT, START, Chain, p_value

WAYS = (
    Way("independent", 3),
    Way(SPREAD, 3),
    Way(FITTED_M, 2, most=4),
    Way(SPREAD, 3, 2),
    Way(FITTED_K, 3, 3, distinct=2),
)


class ChainModel:
    """The chain as lanes: a state holds what every lane has written."""

    def begun(self, prompts: np.ndarray) -> State:
        return self._state(np.zeros((len(prompts), 0), int))

    def after(self, state: State, tokens: np.ndarray) -> State:
        written: Any = state.cache
        return self._state(np.column_stack([written, tokens]))

    def picked(self, state: State, lanes: np.ndarray) -> State:
        written: Any = state.cache
        return self._state(written[lanes])

    def _state(self, written: Any) -> State:
        rows = [NEXT[row[-1]] if row.size else START for row in written]
        return State(written, np.log(np.stack(rows)), written.shape[1])


def written(way: Way, number: int, tokens: int) -> watermark_drawing.Told:
    author = Author.of(Method("flat", way.m, way.k, history=True), number, "text")
    return write(way, author, ChainModel(), np.zeros(1, int), tokens, 1.0, ())


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.name} {way.k}")
def test_a_text_has_the_distribution_of_the_model(way: Way) -> None:
    """Three tokens under each of 1,000 keys; false alarm: 1e-6."""
    distribution = Chain(Prg.from_seed(0, "unused")).text_distribution(3)
    texts = [tuple(written(way, number, 3).tokens[:3]) for number in range(1000)]
    assert p_value(texts, distribution) > FALSE_ALARM


def test_ways_do_what_they_say() -> None:
    texts = {way: [written(way, number, 30) for number in range(20)] for way in WAYS}
    plain, spread, fitted, _, chunks = (texts[way] for way in WAYS)
    assert all(told.asked == 3 * len(told.tokens) and len(told.distinct) == 30 for told in plain)
    assert sum(sum(t.distinct) for t in spread) > 1.05 * sum(sum(t.distinct) for t in plain)
    for told in fitted:
        sizes = [2, *(min(max(2, 2 * n), 4) for n in told.distinct[:-1])]
        assert told.asked == sum(sizes)
    for told in chunks:
        assert told.asked == 3 * len(told.tokens)
        alone = sum(n == 1 for n in told.distinct)  # chunks of three tokens
        assert len(told.tokens) >= 3 * alone + len(told.distinct) - alone
        assert 10 <= len(told.distinct) < 30 <= len(told.tokens) <= 32
    for told in (t for of_way in texts.values() for t in of_way):
        assert len(told.nats) == len(told.entropy) == len(told.tokens)
        assert max(told.entropy) <= np.log(3)


def test_the_command_goes_on_with_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    ways = WAYS[:2]

    class Nothing:
        def __init__(self, *given: Any) -> None:
            pass

    def cell(study: Any, way: Way, temperature: float) -> dict[str, Any]:
        made.append(f"{temperature:g} {way.name}")
        if len(made) == 2:
            raise InputError("enough")
        one = [float(len(made)), 0.0, 9.0]
        return {
            "temperature": temperature,
            **vars(way),
            "texts": 4,
            "asked": [3.0, 3.0, 3.0],
            "tokens_a_chunk": one,
            "distinct_a_chunk": one,
            "bits": one,
            "excess_bits": one,
            "by_length": {"20": {"auc": one, "pauc": one}},
            "scores": f"{len(made)} {len(made)}",
        }

    monkeypatch.setattr(watermark_drawing, "Study", Nothing)
    monkeypatch.setattr(watermark_drawing, "WAYS", ways)
    monkeypatch.setattr(watermark_drawing, "cell", cell)
    file = tmp_path / "found.json"
    command = [
        "experiment",
        "watermark-drawing",
        "--texts",
        "4",
        "--tokens",
        "20",
        "--temperatures",
        "1",
        "--json",
        str(file),
    ]
    options = cli.command_line().parse_args(command)
    with pytest.raises(InputError, match="enough"):
        options.run(options)
    options.run(options)
    assert made == ["1 independent", "1 spread", "1 spread"]
    content = json.loads(file.read_text())
    assert [row["name"] for row in content["rows"]] == ["independent", "spread"]
    (line,) = (line for line in table(content).splitlines() if line.startswith("| spread"))
    assert "+2.00 (+2.00 to +2.00)" in line  # 3 less 1


def test_as_many_independent_ones() -> None:
    """Between 4 and 16 tokens asked for, 8 are half the way."""
    rows = [
        {"temperature": 1.0, "name": name, "m": m, "k": 1, "asked": [asked], "scores": scores}
        for name, m, asked, scores in (
            ("independent", 4, 4.0, "1 2"),
            ("independent", 16, 16.0, "3 8"),
            (FITTED_M, 8, 8.0, "9 9"),
            (FITTED_M, 8, 40.0, "9 9"),
        )
    ]
    collected = [watermark_drawing._independent({"rows": rows}, row) for row in rows]
    np.testing.assert_allclose(np.array(collected), [[1, 2], [3, 8], [2, 5], [3, 8]])
