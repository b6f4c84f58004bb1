"""How good programs are that a model wrote for tasks with tests: Pass@r, Fusi, and who wins by the
rules of NOIR (5.1, 5.2), were they an attacker's reconstructions of the references.
"""

from __future__ import annotations

import os
import statistics
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from spu_llm.core.errors import InputError
from spu_llm.service.untrusted import PASSED, Limits, run_tests
from spu_llm.systems.outcome import wilson
from spu_llm.systems.split.code_tasks import CodeTask
from spu_llm.systems.split.scores import (
    CODEBLEU_WINS,
    SuccessRate,
    codebleu_like,
    fusi,
    pass_at,
    wins_functionality,
    wins_privacy,
)

MAX_JOBS = 256
MAX_SCORED = 1 << 16  # characters of a completion


@dataclass(frozen=True)
class Mean:
    """The mean over tasks of a share, with a 95 % interval (Wilson). It is a proportion's: a value
    between 0 and 1 varies no more than a coin with its mean, so the interval is no narrower than it
    should be, also where all tasks have 0.
    """

    mean: float
    low: float
    high: float
    tasks: int

    @staticmethod
    def of(shares: Sequence[float]) -> Mean:
        """Return the mean of shares, 0 to 1; there is one at least."""
        return Mean(
            statistics.fmean(shares),
            *wilson(min(sum(shares), len(shares)), len(shares)),
            len(shares),
        )


@dataclass(frozen=True)
class TaskScore:
    """Score of a task by its tests. reference: what became of each test, with the reference;
    completions: the same for each completion. codebleu: of each, 0 to 100 (`codebleu_like`).
    private: whether a completion is near the reference by BLEU-1 or ROUGE-1.
    """

    id: str
    reference: list[str]
    completions: list[list[str]]
    codebleu: list[float]
    private: bool
    confidential: bool

    @property
    def right(self) -> int:
        """Return how many completions pass all tests."""
        return sum(set(outcomes) == {PASSED} for outcomes in self.completions)

    @property
    def fusi(self) -> list[float] | None:
        """Return Fusi of each completion, None where the reference passes no test."""
        truth = _passed(self.reference)
        return [fusi(_passed(o), truth) for o in self.completions] if truth else None

    @property
    def functional(self) -> bool | None:
        """Return whether a completion passes a test that the reference passes; None where that
        passes none.
        """
        truth = _passed(self.reference)
        return wins_functionality(map(_passed, self.completions), truth) if truth else None


@dataclass(frozen=True)
class CodeScores:
    """Scores of all tasks; r: those of Pass@r. jobs: how many programs ran at a time."""

    tasks: list[TaskScore]
    r: tuple[int, ...]
    limits: Limits
    jobs: int = 1

    @property
    def pass_at(self) -> dict[int, Mean]:
        """Return Pass@r, 0 to 1, by r: the mean over tasks."""
        return {
            r: Mean.of([pass_at(len(t.completions), t.right, r) for t in self.tasks])
            for r in self.r
        }

    @property
    def fusi(self) -> Mean | None:
        """Return the mean over tasks of the mean over completions. Tasks whose reference passes no
        test have no Fusi; None where there are no others.
        """
        shares = [statistics.fmean(f) for t in self.tasks if (f := t.fusi) is not None]
        return Mean.of(shares) if shares else None

    @property
    def codebleu(self) -> float:
        """Return the mean over tasks of the mean over completions, 0 to 100."""
        return statistics.fmean(statistics.fmean(t.codebleu) for t in self.tasks)

    @property
    def won(self) -> dict[str, SuccessRate]:
        """Return for how many tasks the best completion wins, by rule."""
        functional = [won for t in self.tasks if (won := t.functional) is not None]
        rates = {
            "privacy": SuccessRate.of(t.private for t in self.tasks),
            "confidentiality": SuccessRate.of(t.confidential for t in self.tasks),
        }
        return rates | ({"functionality": SuccessRate.of(functional)} if functional else {})

    @property
    def failing_references(self) -> list[str]:
        """Return the ids of tasks whose reference does not pass all tests."""
        return [t.id for t in self.tasks if set(t.reference) != {PASSED}]

    def to_json(self) -> dict[str, Any]:
        """Return all of it, as `spu-llm split score --json` writes it."""
        return {
            "tasks": len(self.tasks),
            "completions": sum(len(t.completions) for t in self.tasks),
            "pass_at": {str(r): asdict(mean) for r, mean in self.pass_at.items()},
            "fusi": None if self.fusi is None else asdict(self.fusi),
            "codebleu_like": self.codebleu,
            "won": {
                rule: {**asdict(rate), "rate": rate.rate, "interval": list(rate.interval)}
                for rule, rate in self.won.items()
            },
            "failing_references": self.failing_references,
            "limits": asdict(self.limits),
            "jobs": self.jobs,
            "per_task": [
                {
                    "task_id": t.id,
                    "right": t.right,
                    "reference": t.reference,
                    "completions": t.completions,
                    "fusi": t.fusi,
                    "codebleu_like": t.codebleu,
                }
                for t in self.tasks
            ],
        }


def score_programs(
    tasks: Sequence[CodeTask],
    completions: Mapping[str, Sequence[str]],
    r: Sequence[int] | None = None,
    limits: Limits = Limits(),
    jobs: int | None = None,
    on_program: Callable[[int, int], None] = lambda done, total: None,
) -> CodeScores:
    """Run the tests of all tasks on references and completions, `jobs` programs at a time (as many
    as there are cores by default).

    r: of Pass@r; by default those of 1 and 10 for which there are completions. limits: of each
    program (`service.untrusted.run_tests` says what it can do). A completion of more than 65536
    characters is run, but compared with the reference as an empty text. on_program: told how many
    of how many programs are done. InputError for a task without completions, for an r above the
    fewest completions of a task, or where this machine cannot confine programs: none is run then.
    """
    fewest = _fewest(tasks, completions)
    asked = tuple(r or (one for one in (1, 10) if one <= fewest))
    for one in asked:
        if not 1 <= one <= fewest:
            raise InputError(
                f"Pass@{one} needs {max(one, 1)} completions of each task; a task has {fewest}"
            )
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    if not 1 <= jobs <= MAX_JOBS:
        raise InputError(f"--jobs must be 1 to {MAX_JOBS}, found {jobs}")
    work = [
        (task.program(text), task.tests)
        for task in tasks
        for text in (task.reference, *completions[task.id])
    ]
    outcomes = iter(_all_outcomes(work, limits, jobs, on_program))
    scores = []
    for task in tasks:
        reference = next(outcomes)
        texts = completions[task.id]
        scores.append(_score(task, reference, texts, [next(outcomes) for _ in texts]))
    return CodeScores(scores, asked, limits, jobs)


def _fewest(tasks: Sequence[CodeTask], completions: Mapping[str, Sequence[str]]) -> int:
    for task in tasks:
        if not completions.get(task.id):
            raise InputError(f"task {task.id} has no completion")
    return min(len(completions[task.id]) for task in tasks)


def _all_outcomes(
    work: Sequence[tuple[str, Sequence[str]]],
    limits: Limits,
    jobs: int,
    on_program: Callable[[int, int], None],
) -> list[list[str]]:
    """Run all programs with their tests; return the outcomes in the same order. Whatever ends this
    ends the programs first.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            running = [pool.submit(run_tests, *one, limits, stop.is_set) for one in work]
            outcomes = []
            for done, one in enumerate(running, 1):
                outcomes.append(one.result())
                on_program(done, len(running))
            return outcomes
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _score(
    task: CodeTask, reference: list[str], texts: Sequence[str], outcomes: list[list[str]]
) -> TaskScore:
    # Bodies of functions, which HumanEval's completions are, can be parsed where they stand alone.
    truth, guesses = textwrap.dedent(task.reference), [_scored(text) for text in texts]
    codebleu = [codebleu_like(guess, truth) for guess in guesses]
    return TaskScore(
        task.id,
        reference,
        outcomes,
        codebleu,
        wins_privacy(guesses, truth),
        max(codebleu) >= CODEBLEU_WINS,
    )


def _scored(text: str) -> str:
    """Return what of a completion is compared with the reference."""
    return textwrap.dedent(text) if len(text) <= MAX_SCORED else ""


def _passed(outcomes: Sequence[str]) -> frozenset[int]:
    return frozenset(i for i, outcome in enumerate(outcomes) if outcome == PASSED)
