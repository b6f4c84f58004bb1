"""Scores of guesses and completions: by hand, and at their ends (spec: oracle 11 of NOIR)."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.systems.outcome import wilson
from spu_llm.systems.split import python_code
from spu_llm.systems.split.scores import (
    SuccessRate,
    bleu1,
    codebleu_like,
    crt,
    fusi,
    identifier_leak,
    in_place,
    leaked_identifiers,
    pass_at,
    rouge1,
    wins_confidentiality,
    wins_functionality,
    wins_privacy,
)

CODE = '''\
import json as reader
from os import path

class Loader:
    def load(self, name, *, strict=True):
        """Read `name`: total = 3."""
        with open(path.join("a", name)) as handle:
            rows = [reader.loads(line) for line in handle]
        self.count = len(rows)
        return rows
'''
RENAMED = CODE
for old, new in (
    ("reader", "tool"),
    ("path", "fs"),
    ("Loader", "Klass"),
    ("load", "run"),
    ("name", "key"),
    ("handle", "file"),
    ("rows", "found"),
    ("line", "text"),
    ("count", "size"),
):
    RENAMED = RENAMED.replace(old, new)


def test_pass_at_r() -> None:
    """Oracle 11."""
    assert pass_at(20, 3, 10) == pytest.approx(0.894737, abs=5e-7)
    assert (pass_at(20, 0, 10), pass_at(20, 11, 10), pass_at(4, 1, 1)) == (0, 1, 0.25)
    for wrong in ((3, 4, 1), (3, 1, 4), (3, 1, 0)):
        with pytest.raises(ValueError, match="no Pass@"):
            pass_at(*wrong)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), *[st.integers(0, n)] * 2)))
def test_pass_at_r_is_the_share_of_choices_with_a_pass(given: tuple[int, int, int]) -> None:
    n, c, r = given
    if r == 0:
        return  # there is no Pass@0
    choices = list(itertools.combinations([True] * c + [False] * (n - c), r))
    assert pass_at(n, c, r) == sum(map(any, choices)) / len(choices)


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_pass_at_r_does_not_overflow(c: int, r: int) -> None:
    value = pass_at(5000, c, r)
    assert 0 <= value <= 1 and (value == 0) == (c == 0)
    assert pass_at(5000, c, 1) == c / 5000 and value >= c / 5000


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9), min_size=1))
def test_fusi_counts_tests(guess: set[int], truth: set[int]) -> None:
    both = [u for u in range(10) if u in guess and u in truth]
    assert fusi(guess, truth) == len(both) / len([u for u in range(10) if u in truth])
    assert wins_functionality([guess], truth) == bool(both)


def test_fusi() -> None:
    """Oracle 11."""
    assert fusi({2, 3}, {1, 2, 4}) == pytest.approx(1 / 3)
    assert fusi(set(), {1}) == 0 and fusi({1, 2}, {1}) == 1
    with pytest.raises(ValueError, match="not defined"):
        fusi({1}, set())
    assert wins_functionality([set(), {2, 3}], {1, 2, 4})
    assert not wins_functionality([{3}, {5}], {1, 2, 4})


def test_bleu_and_rouge_by_hand() -> None:
    """Of "a a b c d" and "a b b e": common are one a and one b."""
    truth, guess = "a a b c d", "a b b e"
    assert bleu1(guess, truth) == pytest.approx(100 * math.exp(1 - 5 / 4) * 2 / 4)
    assert bleu1(truth, guess) == pytest.approx(100 * 2 / 5)  # longer: no penalty
    assert rouge1(guess, truth) == pytest.approx(2 * 2 / (4 + 5)) == rouge1(truth, guess)
    for nothing in ("", "  \n", "x y"):
        assert bleu1(nothing, truth) == rouge1(nothing, truth) == 0
    assert bleu1("", "") == rouge1("", "") == 0


def test_recovered_tokens_by_hand() -> None:
    truth, guess = [5, 5, 7, 9], [5, 7, 7, 9, 5]
    assert crt(truth, guess) == 1 and crt(guess, truth) == 4 / 5
    assert in_place(truth, guess) == 3 / 4 and in_place(guess, truth) == 3 / 5
    assert crt(truth, []) == in_place(truth, []) == 0
    for score in (crt, in_place):
        with pytest.raises(ValueError, match="empty"):
            score([], guess)


def test_the_papers_rules_of_who_wins() -> None:
    """The thresholds themselves win; one attempt of many is enough."""
    truth = " ".join("abcdefghij")
    # BLEU-1 of 20: 2 of 10 words, as many words as the truth; ROUGE-1 is 0.2.
    assert wins_privacy(["a b 1 2 3 4 5 6 7 8"], truth)
    assert not wins_privacy(["a 1 2 3 4 5 6 7 8 9"], truth)
    # ROUGE-1 of 0.4 alone: a guess that is too short for BLEU-1.
    assert bleu1("a b c", truth) < 10 and rouge1("a b c", truth) == pytest.approx(6 / 13)
    assert wins_privacy(["a b c"], truth) and not wins_privacy(["a b"], truth)
    assert not wins_privacy([], truth) and wins_privacy(["1", truth], truth)
    assert wins_confidentiality(["", CODE], CODE)
    assert not wins_confidentiality(["{ } ( ("], CODE)


def test_success_rates_have_wilson_intervals() -> None:
    rate = SuccessRate.of([True, False, False, True])
    assert (rate.rate, rate.interval) == (0.5, wilson(2, 4))
    assert rate.interval == pytest.approx((0.1500, 0.8500), abs=5e-5)


def test_codebleu_like_at_its_ends() -> None:
    assert codebleu_like(CODE, CODE) == pytest.approx(100)
    assert codebleu_like("", CODE) == codebleu_like("x y", "") == 0
    # The example of k4black/codebleu: syntax and data flow are the same; CodeBLEU has 0.5537.
    actual = codebleu_like(
        "def add ( a , b ) :\n return a + b", "def sum ( first , second ) :\n return second + first"
    )
    assert actual == pytest.approx(55.4, abs=8)


def test_codebleu_like_knows_structure_from_words() -> None:
    """Other names leave syntax and data flow; other order and broken text do not."""
    renamed, broken = codebleu_like(RENAMED, CODE), codebleu_like("(" + CODE, CODE)
    shuffled = codebleu_like(" ".join(sorted(python_code.words(CODE))), CODE)
    assert 60 < renamed < 95
    assert 45 < broken < 51  # the words alone
    assert shuffled < broken / 2
    # A truth that does not parse is scored by its words.
    assert codebleu_like("(" + CODE, "(" + CODE) == pytest.approx(100)


def test_data_flow_by_hand() -> None:
    text = "def f(a, b):\n    c = a + b\n    for d in c:\n        c += d\n    return c"
    tree = python_code.parsed(text)
    assert tree is not None
    a, b, c, d = range(4)
    assert dict(python_code.flows(tree)) == {
        (c, a): 1,
        (c, b): 1,
        (d, c): 1,
        (c, c): 1,
        (c, d): 1,
        (-1, c): 1,
    }


def test_subtrees_by_hand() -> None:
    tree = python_code.parsed("x = y + 1")
    assert tree is not None
    # Module, Assign, BinOp; leaves and names do not count.
    assert sorted(python_code.subtrees(tree)) == [
        "Assign(Name,BinOp(Name,Add,Constant))",
        "BinOp(Name,Add,Constant)",
        "Module(Assign(Name,BinOp(Name,Add,Constant)))",
    ]


def test_identifiers_of_whole_and_broken_code() -> None:
    wanted = {
        "json",
        "reader",
        "os",
        "path",
        "Loader",
        "load",
        "name",
        "strict",
        "handle",
        "rows",
        "line",
        "count",
    }
    assert python_code.defined(CODE) == wanted
    # Words alone find them too; a word of a string or a comment is none.
    broken = CODE + "\n    def (  # nothing = 1\n"
    assert python_code.parsed(broken) is None
    assert python_code.defined(broken) == wanted
    assert python_code.names("total 'rows' # rows") == {"total"}
    assert python_code.names("f'a' + rb\"b\" + x") == {"x"}
    assert python_code.names('x = """y\n z') == {"x"}  # cut off
    assert python_code.words("x=f'a b'  # c") == ["x", "=", "f'a b'"]


def test_leaks_are_names_of_the_truth_in_the_guess() -> None:
    assert leaked_identifiers("]] rows = = handle (", CODE) == {"rows", "handle"}
    assert identifier_leak("import json", CODE)
    # Names of any Python, and those that stand in strings of the guess, are none.
    assert not identifier_leak("def f(self): return open(len(print)) # rows\n'handle'", CODE)
    assert not identifier_leak(CODE, "print(len('rows'))")


@given(st.text(max_size=60), st.text(max_size=60))
def test_scores_take_any_text(guess: str, truth: str) -> None:
    assert 0 <= bleu1(guess, truth) <= 100 and 0 <= rouge1(guess, truth) <= 1
    assert 0 <= codebleu_like(guess, truth) <= 100 + 1e-9
    assert leaked_identifiers(guess, truth) <= python_code.defined(truth)


@pytest.mark.parametrize(
    "guess",
    [
        "x = " + "-" * 900 + "1",
        "g" + "()" * 1200,
        "if a: pass" + "\nelif a: pass" * 1200,
        ",".join(f"a{i}" for i in range(5000)) + " = " + ",".join(f"b{i}" for i in range(5000)),
        "x = " + "[" * 80 + "a," * 30000 + "]" * 80,
        '"' + '\\"' * 32000,
        "x = '" + "\\'" * 32000,
    ],
)
def test_a_guess_is_scored_whatever_it_is(guess: str) -> None:
    """In a process with 400 MB more than Python has, and 10 s of CPU time."""
    code = (
        "import resource, sys; from spu_llm.systems.split.scores import codebleu_like as score\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (10, 10))\n"
        "most = int(open('/proc/self/statm').read().split()[0]) * 4096 + (400 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "print(0 <= score(sys.stdin.read(), 'def f(a):\\n    return a') <= 100)"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=guess, capture_output=True, text=True)
    assert ran.stdout == "True\n", ran.stderr[-300:]


def test_an_open_quote_is_a_sign() -> None:
    words = python_code.words
    assert words("don't go") == ["don", "'", "t", "go"]
    assert words("'a\\'b' c") == ["'a\\'b'", "c"] and words("r'\\' c") == ["r", "'", "\\", "'", "c"]
    assert python_code.names('\\"rows\\" total') == {"rows", "total"}
    assert words("'a\\\nb' c") == ["'a\\\nb'", "c"]


def test_flows_are_counted_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = python_code.parsed("a, b = c, d\ne = a\nf = b")
    assert tree is not None and python_code.flows(tree).total() == 6
    monkeypatch.setattr(python_code, "MAX_FLOWS", 5)
    assert python_code.flows(tree).total() == 5
