"""How the scores of programs are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from spu_llm.api.code_scores import CodeScores, Mean


def lines_of(scores: CodeScores) -> Iterator[str]:
    """Yield a table of scores in lines, and what else there is to know of them."""
    count = sum(len(task.completions) for task in scores.tasks)
    yield f"{len(scores.tasks)} tasks, {count} completions; 95 % intervals over tasks"
    for r, mean in scores.pass_at.items():
        yield _line(f"Pass@{r}", mean)
    if scores.fusi is not None:
        yield _line("Fusi", scores.fusi)
    yield f"{'CodeBLEU-like':<18}{scores.codebleu:>7.1f}"
    for rule, rate in scores.won.items():
        low, high = rate.interval
        name = f"{rule} won"
        yield (
            f"{name:<18}{rate.wins:>5} of {rate.texts} tasks "
            f"({low:.1%} to {high:.1%}), were they an attacker's"
        )
    outcomes = Counter(o for task in scores.tasks for tests in task.completions for o in tests)
    counts = (f"{outcome} {count}" for outcome, count in outcomes.most_common())
    yield f"tests of completions: {', '.join(counts)}"
    if failing := scores.failing_references:
        some = ", ".join(failing[:5]) + (", ..." if len(failing) > 5 else "")
        yield f"the reference fails a test of its own in {len(failing)} tasks: {some}"


def _line(name: str, mean: Mean) -> str:
    return f"{name:<18}{mean.mean:>7.1%}   ({mean.low:.1%} to {mean.high:.1%})"
