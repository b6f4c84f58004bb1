"""The book of secrets: repeats bring the same fakes, and end when they give too much away. Which
fakes a book draws depends on its key; keys repeat from run to run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from spu_llm.core.errors import InputError
from spu_llm.systems.confidential.book import Book, Secret
from spu_llm.systems.confidential.obfuscation import Limits, TooFewError, log_probabilities, typed
from tests.kit.seeded import seed_urandom
from tests.systems.confidential.toys import prompt_of, public_of, shipped

PUBLIC = shipped()
FIRST = "# Written by <redacted>Guido</redacted> in 1999.\nimport os"
SECOND = "# Mail <redacted>Guido</redacted> about this.\nimport sys"
LIMITS = Limits(fakes=8, fewest=2)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_urandom(monkeypatch)


def texts_of(prompt: str, rows: list[np.ndarray]) -> set[str]:
    of = prompt_of(PUBLIC, prompt)
    collected = [typed(PUBLIC.tokenizer, of, row) for row in rows]
    return {words[0] for words in collected if words}


def test_the_same_prompt_brings_the_same_rows(tmp_path: Path) -> None:
    """In the same order, in another process too: there is nothing to intersect."""
    prompt = prompt_of(PUBLIC, FIRST)
    rows, own, _ = Book(tmp_path / "book").rows(PUBLIC, prompt, LIMITS)
    assert rows[own].tolist() == prompt.tokens
    again, at, _ = Book(tmp_path / "book").rows(PUBLIC, prompt, LIMITS)
    assert at == own and np.array_equal(rows, again)


def test_without_a_folder_books_know_nothing_of_each_other() -> None:
    prompt = prompt_of(PUBLIC, FIRST)
    one, other = (Book(None).rows(PUBLIC, prompt, LIMITS)[0] for _ in range(2))
    assert len(texts_of(FIRST, one) & texts_of(FIRST, other)) < 5


def test_the_same_secret_elsewhere_brings_the_same_candidates(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    first = "# Return the <redacted>name</redacted> of the"
    second = "# Read the <redacted>name</redacted> of the"
    wide = Limits(fakes=8, fewest=2, eta=3.0)
    rows, _, _ = book.rows(PUBLIC, prompt_of(PUBLIC, first), wide)
    prompt = prompt_of(PUBLIC, second)
    anything = Limits(fakes=8, fewest=1, eta=9.0)
    more, own, most = book.rows(PUBLIC, prompt, anything)
    assert more[own].tolist() == prompt.tokens
    assert texts_of(second, more) <= texts_of(first, rows)
    (entry,) = json.loads((tmp_path / "book" / "secrets.json").read_text())
    assert len(entry["prompts"]) == 2 and 0 < most < 1
    *_, logs = entry["prompts"].values()
    fit = [log for log in logs if log is not None]
    assert sorted(fit) == pytest.approx(sorted(log_probabilities(PUBLIC, prompt, np.array(more))))


def test_the_most_is_the_worst_of_two_readings() -> None:
    """Candidates as even as can be in the second prompt, but not in frequency: the first prompt's
    likelihoods count either way.
    """
    uneven = [np.log(1e-4), *[np.log(1e-2)] * 8]
    words = [[str(i)] for i in range(9)]
    one = Secret(words, 0.0, "", {"first": uneven})
    assert one.most() == pytest.approx(1 / 9)
    both = Secret(words, 0.0, "", {"first": uneven, "second": [0.0] * 9})
    assert both.most() == pytest.approx(100 / 108)
    later = Secret(words, 0.5, "", {"first": [0.0] * 9, "second": [np.log(2), *[0.0] * 7, None]})
    assert later.most() == pytest.approx(1 / (1 + 7 * np.exp(-0.5) / 2))


def test_the_limit_is_kept_whichever_candidate_is_the_own(tmp_path: Path) -> None:
    """A toy where one candidate is much likelier in the second text: refused for all of them."""
    public = public_of(0, 2.0)
    chances = np.exp(public.scorer._logs)  # type: ignore[attr-defined]
    wide, tight = (Limits(fakes=3, fewest=3, eta=eta, beam=40, width=20.0) for eta in (4.0, 0.5))
    refused = []
    for letter in "abcdefghij":
        book = Book(tmp_path / letter)
        try:
            first_prompt = prompt_of(public, f"c<redacted>{letter}</redacted>d")
            rows, _, _ = book.rows(public, first_prompt, wide)
        except TooFewError:
            continue
        tokens = np.array([int(row[1]) for row in rows])
        first, second = (
            np.log(chances[a, tokens] * chances[tokens, b]) for a, b in ((3, 4), (9, 10))
        )
        x = wide.eta + np.abs(first[:, None] - first) + np.maximum(0, second[:, None] - second)
        np.fill_diagonal(x, 0)
        most = (1 / np.exp(-x).sum(axis=1)).max()
        again = prompt_of(public, f"i<redacted>{letter}</redacted>j")
        if most > tight.bound(tight.fewest):
            with pytest.raises(InputError, match="sent before; .* nothing was sent"):
                book.rows(public, again, tight)
            refused.append(letter)
        else:
            assert len(book.rows(public, again, tight)[0]) == 4
    assert refused


def test_a_candidate_that_stands_in_the_clear_drops_out() -> None:
    """Had it been the own one, that prompt would have been refused."""
    book, text = Book(None), "# Read the <redacted>name</redacted> of the file"
    words = ["name", "file", "path", "size", "value"]
    first: dict[str, list[float | None]] = {"an earlier prompt": [0.0] * len(words)}
    book._secrets.append(Secret([[word] for word in words], 1.0, "", first))
    anything = Limits(fakes=8, fewest=1, eta=9.0)
    rows, _, _ = book.rows(PUBLIC, prompt_of(PUBLIC, text), anything)
    assert "name" in texts_of(text, rows) and "path" in texts_of(text, rows)
    assert "file" not in texts_of(text, rows)
    (secret,) = book._secrets
    assert [log is None for log in list(secret.prompts.values())[1]][:2] == [False, True]


def test_what_is_refused_is_not_entered(tmp_path: Path) -> None:
    book = Book(tmp_path)
    os.chmod(tmp_path, 0o700)
    book.rows(PUBLIC, prompt_of(PUBLIC, FIRST), LIMITS)
    before = (tmp_path / "secrets.json").read_bytes()
    with pytest.raises(InputError):
        book.rows(PUBLIC, prompt_of(PUBLIC, SECOND), Limits(fakes=8, fewest=8, eta=1e-6))
    assert (tmp_path / "secrets.json").read_bytes() == before


def test_a_secret_in_other_company_is_refused(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.rows(PUBLIC, prompt_of(PUBLIC, FIRST), LIMITS)
    text = "# <redacted>Guido</redacted> and <redacted>Tim</redacted> wrote this.\n"
    with pytest.raises(InputError, match="was sent before, with other spans or spelt"):
        book.rows(PUBLIC, prompt_of(PUBLIC, text), LIMITS)


@pytest.mark.parametrize("like", ["guido", "Guido van", " Guido"])
def test_a_secret_that_is_nearly_the_same_is_refused(tmp_path: Path, like: str) -> None:
    book = Book(tmp_path / "book")
    book.rows(PUBLIC, prompt_of(PUBLIC, FIRST), LIMITS)
    with pytest.raises(InputError, match="or one like it, was sent before"):
        book.rows(PUBLIC, prompt_of(PUBLIC, FIRST.replace("Guido", like)), LIMITS)


def test_a_secret_in_the_clear_is_refused() -> None:
    with pytest.raises(InputError, match="stands outside of its span"):
        Book(None).rows(PUBLIC, prompt_of(PUBLIC, FIRST + "  # guido"), LIMITS)


def test_another_public_model_is_refused_for_the_same_secret(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    book.rows(PUBLIC, prompt_of(PUBLIC, FIRST), LIMITS)
    other = dataclasses.replace(PUBLIC, digest="another")
    with pytest.raises(InputError, match="another public model"):
        book.rows(other, prompt_of(PUBLIC, SECOND), LIMITS)


@pytest.mark.slow
def test_a_smaller_set_has_an_order_of_its_own() -> None:
    """Nothing of one order follows from the other: the own row moves."""
    book, limits = Book(None), Limits(fakes=8, fewest=2)
    prompt = prompt_of(PUBLIC, FIRST)
    moved = 0
    for _ in range(20):
        book = Book(None)
        rows, own, _ = book.rows(PUBLIC, prompt, limits)
        (secret,) = book._secrets
        context = next(iter(secret.prompts))
        secret.prompts[context] = [*secret.prompts[context][:5], *[None] * (len(rows) - 5)]
        _, at, _ = book.rows(PUBLIC, prompt, limits)
        moved += (at == 0) != (own == 0)
    assert moved


def test_a_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    Book(folder).rows(PUBLIC, prompt_of(PUBLIC, FIRST), LIMITS)
    assert {oct(p.stat().st_mode & 0o777) for p in folder.iterdir()} == {"0o600"}
    folder.chmod(0o755)
    with pytest.raises(InputError, match="others can read"):
        Book(folder)


@pytest.mark.parametrize("name, content", [("key", b"short"), ("secrets.json", b"[{}]")])
def test_a_damaged_book_is_not_ignored(tmp_path: Path, name: str, content: bytes) -> None:
    folder = tmp_path / "book"
    Book(folder)
    (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(str(folder))):
        Book(folder).rows(PUBLIC, prompt_of(PUBLIC, FIRST), LIMITS)


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "book").write_text("")
    with pytest.raises(InputError, match="cannot be used for secrets"):
        Book(tmp_path / "book")
