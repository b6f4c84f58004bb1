"""Figures of a training, made up."""

from __future__ import annotations

from models.training import evaluate

FIGURES = evaluate.Evaluation(
    38003,
    evaluate.Fit(42.746, 1.7214),
    evaluate.Fit(58.4, 1.9),
    acceptance=0.7377,
    argmax_agreement=0.8,
    expected_tokens_per_step=[2.68, 3.2, 3.476, 3.63],
    simulated=[
        evaluate.Speed(t, n, n / 2 + t, 0.5)
        for t in evaluate.TEMPERATURES
        for n in evaluate.DRAFT_LENGTHS
    ],
    samples={"0.7": " pass"},
)
