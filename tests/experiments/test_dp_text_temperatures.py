"""The study of private text over temperatures: its cells, its candidates, and how it is shown."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.dp_text import tempered
from experiments.dp_text.candidates import Expansion, counted
from experiments.dp_text.plan import DpTextPlan, cell_of, cells, usual_temperature
from spu_llm.app import cli
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.mechanism import expanded_top_k
from spu_llm.systems.dp_text.methods import invisible_ink
from spu_llm.systems.dp_text.parameters import Parameters
from tests.experiments.dp_text_results import made_up, row

# ---- cells


def test_temperatures_are_of_invisibleink_and_the_public_model() -> None:
    plan = DpTextPlan(epsilons=(3.0,), batches=(7,), temperatures=(0.8, 1.2))
    at: dict[tuple[str, int | None], list[float]] = {}
    for cell in cells(plan):
        at.setdefault((cell.method, cell.top_k), []).append(cell.temperature)
    assert at["public-only", None] == at["public-only", 10] == [0.8, 1.2]
    assert at["invisibleink", 50] == at["null-references", 50] == [0.8, 1.2]
    assert at["full-vocabulary", None] == [0.8, 1.2]
    assert set(at["amin", None] + at["adapmixed", None]) == {1.0} and at["augpe", 50] == [1.2]
    usual = cells(DpTextPlan())
    assert all(cell.temperature == usual_temperature(cell.top_k) for cell in usual)
    assert {cell.wanted(plan).temperature for cell in cells(plan)} == {0.8, 1.0, 1.2}


def test_a_row_names_the_cell_of_its_temperature() -> None:
    plan = DpTextPlan(epsilons=(3.0,), batches=(7,), temperatures=(0.8, 1.2))
    for cell in cells(plan):
        written = {**cell.__dict__, "state": "run"}
        assert cell_of(written) == cell


def test_the_command_takes_temperatures() -> None:
    line = "experiment dp-text --temperatures 0.8,1"
    assert cli.command_line().parse_args(line.split()).temperatures == [0.8, 1.0]


# ---- candidates


def test_candidates_are_counted_token_by_token() -> None:
    """Sizes are those of V_k+; a token is added exactly when it is none of the k likeliest; what is
    drawn stays the same.
    """
    parameters = Parameters(2, 4.0, 1.0, 30, 3)
    rng = np.random.default_rng(5)
    publics = rng.normal(0, 1.5, (30, 40)).astype(np.float32)
    privates = publics[:, None] + rng.normal(0, 1, (30, 2, 40)).astype(np.float32)
    method, expansion = invisible_ink(parameters), Expansion()
    drawn = []
    for one in (method, counted(method, expansion)):
        token = one.begin(np.ones(2, bool), Prg.from_seed(1, "t"))
        drawn.append([token(*rows) for rows in zip(publics, privates, strict=True)])
    assert drawn[0] == drawn[1]
    sizes = [len(expanded_top_k(public, 3, 4.0, 2)) for public in publics]
    assert expansion.sizes == [sizes] and max(sizes) > 3
    likeliest = np.argsort(-publics, axis=1)[:, :3]
    added = sum(t not in likely for t, likely in zip(drawn[0], likeliest, strict=True))
    assert expansion.added == [added] and 0 < added < 30
    counted(method, expansion).begin(np.ones(2, bool), Prg.from_seed(2, "t"))(
        publics[0], privates[0]
    )
    facts = expansion.facts()
    assert facts["effective_k"][0] == (np.mean(sizes) + sizes[0]) / 2
    assert facts["added"][0] == sum(expansion.added) / 2 and len(expansion.added) == 2


# ---- tables and comparisons


def cell(method: str, k: int | None, temperature: float, mauve: float, **more: Any) -> Any:
    """Return a row at epsilon 3; of the public model, at none."""
    epsilon = None if method == "public-only" else 3.0
    counts = {"clip": 0.5, "effective_k": [12.0, 0.2], "added": [1.5, 0.3]}
    of = counts if method == "invisibleink" else {}
    batch = 1 if method == "public-only" else 7
    return row(method, epsilon, batch, 8.0, mauve, k, **{"temperature": temperature, **of, **more})


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    """Return a result of temperatures 0.8 and 1.2, and k = 10 and 50."""
    plan = {"temperatures": [0.8, 1.2], "top_k": [10, 50, None], "epsilons": [3.0]}
    made = made_up(*rows)
    return {**made, "plan": {**made["plan"], **plan}}


ROWS = (
    cell("public-only", 50, 0.8, 0.5),
    cell("public-only", 50, 1.2, 0.9),
    cell("public-only", None, 1.2, 0.88),
    cell("invisibleink", 10, 0.8, 0.4),
    cell("invisibleink", 10, 1.2, 0.5),
    cell("invisibleink", 50, 0.8, 0.7),
    cell("invisibleink", 50, 1.2, 0.72),
)


def test_a_column_stands_for_each_temperature() -> None:
    shown = "\n\n".join(tempered.in_results(result(*ROWS), "*origin*"))
    assert "| MAUVE, % | ε | τ = 0.8 | τ = 1.2 |" in shown
    assert "| public only, k = 50 | – | 50.0 ± 5.0 | 90.0 ± 5.0 |" in shown
    assert "| InvisibleInk, k = 10, B = 7 | 3 | 40.0 ± 5.0 | 50.0 ± 5.0 |" in shown
    assert "| public only, all tokens | – |  | 88.0 ± 5.0 |" in shown  # not measured at 0.8
    assert "| 7 | 3 | 0.8 | 0.50 | 12.0 ± 0.2 / 1.50 ± 0.30 | 12.0 ± 0.2 /" in shown
    assert shown.count("*origin*") == 4
    alone = "\n\n".join(tempered.in_results(result(*ROWS[:3]), "*origin*"))
    assert "effective k" not in alone and alone.count("*origin*") == 3


def test_comparisons_count_what_chance_leaves() -> None:
    hotter, fifty, alone, mauve, _ = tempered.comparisons(result(*ROWS))
    assert "τ = 1.2 against τ = 0.8" in hotter  # 0.4 to 0.5 counts, 0.7 to 0.72 does not
    assert "in 1 of 2 pairs, lower in 0" in hotter
    assert "k = 50 against k = 10" in fifty and "in 2 of 2 pairs, lower in 0" in fifty
    assert "is best with k = 50 at τ = 1.2: MAUVE 90.0 ± 5.0 %; 1 of 2 other" in alone
    # Each cell is compared with the public model at its own temperature.
    assert "in 1 of 2 cells (InvisibleInk, k = 50, B = 7, τ = 0.8 at ε = 3)" in mauve
    assert mauve.endswith("the other way round in 1")
