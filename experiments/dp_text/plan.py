"""What the study of differentially private text measures: its methods, sizes and cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spu_llm.systems.dp_text.accounting import rho_for
from spu_llm.systems.dp_text.baselines import amin, augpe
from spu_llm.systems.dp_text.corpus import CorpusRequest

DELTA = 1e-6
EPSILONS, BATCHES, TOP_K = (1.0, 3.0, 5.0, 10.0), (3, 7, 15), (10, 50, None)
OURS = ("invisibleink", "full-vocabulary")
BASELINE_BATCHES = {
    "amin": (31,),
    "amin-published": (31, 63, 127),
    "adapmixed": (7,),
    "adapmixed-published": (7,),
}
CONTROL = "null-references"
CHOSEN = ("public-only", CONTROL, *OURS, "amin", "amin-published", "adapmixed", "augpe")
UNREAD = ("public-only", CONTROL, "augpe")  # no batches of references
TEMPERED = ("public-only", CONTROL, *OURS)  # methods that `DpTextPlan.temperatures` is for
TEXTS, TOKENS = 80, 24
MOST_CALLS = 130_000  # of a cell, when all texts have all tokens
WITH_TOP_K, WITHOUT = 1.2, 1.0  # temperatures
ITERATIONS = (1,)  # of AugPE
SHOWN = 2  # texts of a cell that the result keeps


@dataclass(frozen=True)
class DpTextPlan:
    """The study's settings."""

    epsilons: Sequence[float] = EPSILONS
    batches: Sequence[int] = BATCHES
    top_k: Sequence[int | None] = TOP_K
    methods: Sequence[str] = CHOSEN
    baseline_batches: Sequence[int] | None = None  # else `BASELINE_BATCHES`
    texts: int = TEXTS
    tokens: int = TOKENS
    most_calls: int = MOST_CALLS
    seed: int = 0
    iterations: Sequence[int] = ITERATIONS
    temperatures: Sequence[float] | None = None  # of `TEMPERED`; else `usual_temperature`
    corpus: str = "tests"  # of `inputs.ORIGINS`


def usual_temperature(top_k: int | None) -> float:
    """Return the paper's temperature: 1.2 with top-k, 1 without."""
    return WITHOUT if top_k is None else WITH_TOP_K


@dataclass(frozen=True)
class DpTextCell:
    """A method with its settings. epsilon: None for what spends nothing; top_k: None for the whole
    vocabulary; iterations: of AugPE.
    """

    method: str
    epsilon: float | None
    batch: int
    top_k: int | None
    temperature: float
    iterations: int | None = None

    @property
    def has_candidates(self) -> bool:
        """Tell whether tokens are drawn from V_k+, whose size depends on the clip norm."""
        return self.method in ("invisibleink", CONTROL)

    def wanted(self, plan: DpTextPlan) -> CorpusRequest:
        return CorpusRequest(
            "invisibleink" if self.method == CONTROL else self.method,
            self.epsilon,
            DELTA,
            self.batch,
            plan.texts,
            plan.tokens,
            self.temperature,
            self.top_k,
            iterations=self.iterations or augpe.ITERATIONS,
        )

    def state(self, plan: DpTextPlan) -> str:
        """Return whether the cell is run: "INF" where no parameters spend so little, "TLE": too
        many calls.
        """
        if self.method == "amin-published" and self.epsilon is not None:
            tokens = min(amin.PRIVATE_TOKENS, plan.tokens)
            rho = rho_for(self.epsilon, DELTA)
            if amin.published_clip(rho, self.batch, WITHOUT, tokens) is None:
                return "INF"
        lanes = 1 if self.method in UNREAD else self.batch + 1
        if self.iterations is not None:
            lanes = 1 + augpe.VARIATIONS * self.iterations
        calls = plan.texts * plan.tokens * lanes
        return "TLE" if calls > plan.most_calls else "run"


# References in the place of generated texts.
REAL = DpTextCell("real texts", None, 0, None, WITHOUT)


def cells(plan: DpTextPlan) -> list[DpTextCell]:
    """Return all cells of generated texts, in the order in which they are run."""
    planned = [
        DpTextCell(method, epsilon, batch, k, temperature, iterations)
        for method in plan.methods
        for epsilon in ((None,) if method == "public-only" else plan.epsilons)
        for batch in _batches(plan, method)
        for k in _top_k(plan, method)
        for temperature in _temperatures(plan, method, k)
        for iterations in (plan.iterations if method == "augpe" else (None,))
    ]
    return list(dict.fromkeys(planned))


def _batches(plan: DpTextPlan, method: str) -> Sequence[int]:
    if method in UNREAD:  # C / B, and so the control's candidates, are the same for every batch
        return (1,)
    return plan.batches if method in OURS else plan.baseline_batches or BASELINE_BATCHES[method]


def _top_k(plan: DpTextPlan, method: str) -> Sequence[int | None]:
    with_k = [k for k in plan.top_k if k is not None]
    if method == "public-only":
        return plan.top_k
    if method in ("invisibleink", CONTROL):
        return with_k
    return with_k[-1:] or (None,) if method == "augpe" else (None,)


def _temperatures(plan: DpTextPlan, method: str, k: int | None) -> Sequence[float]:
    if plan.temperatures is None or method not in TEMPERED:
        return (usual_temperature(k),)
    return plan.temperatures


def cell_of(row: dict[str, Any]) -> DpTextCell:
    """Return the cell of a row. Files from before AugPE's iterations were a setting have rows of
    one iteration.
    """
    if row["method"] == REAL.method:
        return REAL
    iterations = row.get("iterations", 1 if row["method"] == "augpe" else None)
    return DpTextCell(
        row["method"], row["epsilon"], row["batch"], row["top_k"], row["temperature"], iterations
    )
