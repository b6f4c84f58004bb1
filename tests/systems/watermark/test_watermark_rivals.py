"""Marks of Aaronson, Kirchenbauer and Kuditipudi by the commands: keys, texts, detection."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from spu_llm.api.defaults import shipped
from spu_llm.app import cli
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.cdfs import Family
from spu_llm.systems.watermark.keys import RIVALS, Scheme
from spu_llm.systems.watermark.race_marks import marked_text
from spu_llm.systems.watermark.rivals import aligned_log_p, next_token
from spu_llm.systems.watermark.scores import GREEN, log_p
from tests.kit.command_line import refused
from tests.kit.pair import Pair
from tests.systems.watermark.chains import key_of

P = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
Run = Callable[..., Any]


@pytest.fixture
def ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a part of the command; return what it writes as JSON."""

    def run(*arguments: object) -> Any:
        file = tmp_path / "out.json"
        written = [] if arguments[0] == "keygen" else ["--json", file]
        with pytest.raises(SystemExit) as end:
            cli.main(["watermark", *map(str, [*arguments, *written])])
        assert not end.value.code, capsys.readouterr().err
        return json.loads(file.read_text()) if written else None

    return run


def text_of(method: str, number: int, count: int, delta: float = 2.0) -> list[int]:
    """Return tokens of a text of independent draws of P, marked under a key."""
    scheme, prg = Scheme(2, method=method), Prg.from_seed(number, method)
    token = next_token(key_of(number), scheme, len(P), delta, prg)
    tokens, ended = marked_text(lambda text: P, token, (), count, frozenset())
    assert not ended
    return list(tokens)


@pytest.mark.parametrize("method", RIVALS)
def test_a_text_is_found_by_its_own_key(method: str, ran: Run, tmp_path: Path) -> None:
    """Written, detokenised and found by the commands; another key of the scheme finds nothing."""
    own, other, model = tmp_path / "own", tmp_path / "other", shipped("private")
    for key in (own, other):
        ran("keygen", "--scheme", method, "--tokenizer", model, "--out", key)
    delta = ["--delta", 6] if method == "kirchenbauer" else []
    made = ran("embed", "--key", own, "--max-new-tokens", 40, "--prompt", "def read(", *delta)
    assert not list(tmp_path.glob("*.history")), "nothing remembers what was used"
    text = tmp_path / "text"
    text.write_text(made["text"])
    common = ["detect", text, "--tokenizer", model, "--alpha", 0.01]
    marked, not_marked = (ran(*common, "--key", key) for key in (own, other))
    assert marked["marked"]
    if method == "kuditipudi":
        assert marked["p"] == "0.01", "the best of a hundred"
    else:  # false alarm: 1e-6
        assert marked["log10_p"] < -6 < not_marked["log10_p"]


def test_kirchenbauer_distorts_and_the_others_do_not() -> None:
    """Chi-square of first tokens against the distribution; false alarm 1e-6."""
    for method in RIVALS:
        first = [text_of(method, number, 1, delta=8.0)[0] for number in range(1500)]
        counts = np.bincount(first, minlength=len(P))
        p = stats.chisquare(counts, P * len(first)).pvalue
        if method == "kirchenbauer":
            assert p < 1e-6  # of several green tokens the likeliest takes nearly all
        else:
            assert p > 1e-6


@pytest.mark.parametrize("count", [1, 7, 60])
def test_green_numbers_are_binomial(count: int) -> None:
    """The p-value of unmarked numbers is exact."""
    numbers = Prg.from_seed(count, "numbers").uniform((count,))
    green = int((numbers > 1 - GREEN).sum())
    expected = sum(
        math.comb(count, i) * GREEN**i * (1 - GREEN) ** (count - i) for i in range(green, count + 1)
    )
    assert math.exp(log_p(numbers, Family(), "green")) == pytest.approx(expected)


def test_alignment_ranks_the_own_list_among_others() -> None:
    text = text_of("kuditipudi", 3, 25)
    prg = Prg.from_seed(0, "others")
    assert aligned_log_p(key_of(3), text, 39, prg) == pytest.approx(math.log(1 / 40))
    ranks = [math.exp(aligned_log_p(key_of(n), text, 9, prg)) for n in range(10, 30)]
    assert np.mean(ranks) > 0.3 and min(ranks) >= 0.1
    assert aligned_log_p(key_of(3), [], 9, prg) == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("keygen --scheme aaronson --out k", "marks tokens"),
        ("keygen --scheme aaronson --race --out k", "not allowed with"),
        ("embed --key aaronson --delta 2", "--delta is Kirchenbauer's"),
        ("embed --key kirchenbauer --delta 0", "--delta must be above 0"),
        ("embed --key kuditipudi --stop x", "marks alone, and without --stop"),
        ("embed --key kuditipudi --command cat", "a model run here writes"),
        ("detect text --key aaronson --references 9", "provider's or Kuditipudi's"),
        ("detect text --key kuditipudi --references 9", "give 999 or more"),
        ("detect text --key kuditipudi --join 0.5", "tested alone"),
        ("detect text --key kuditipudi --html x.html", "finds none"),
        ("detect text --key kuditipudi --session 00", "for a provider's key"),
    ],
)
def test_what_a_scheme_has_no_use_for_is_refused(
    arguments: str,
    words: str,
    ran: Run,
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("def")
    options = arguments.split()
    for name in set(RIVALS) & set(options) if options[0] != "keygen" else ():
        ran("keygen", "--scheme", name, "--tokenizer", pair.private, "--out", name)
    of_model = {"detect": "--tokenizer", "embed": "--model"}.get(options[0])
    more = [of_model, str(pair.private)] if of_model and "--command" not in options else []
    assert words in refused(capsys, "watermark", *options, *more)
