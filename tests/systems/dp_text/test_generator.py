"""Lanes and the driver on tiny models: what public logits depend on, and what each reference's
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import dp_event

from models.family import ModelConfig, logits
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text import lanes as lanes_module
from spu_llm.systems.dp_text.generator import Generator, Made, batches
from spu_llm.systems.dp_text.lanes import Features, Lanes, folded
from spu_llm.systems.dp_text.methods import Method, Next, invisible_ink, public_only
from spu_llm.systems.dp_text.parameters import Parameters
from spu_llm.systems.dp_text.prompts import Prompts, prompts_for, read_references
from tests.kit.models import LLAMA, PRIVATE, endless, save_tokenizer, tiny_params

QUERY = "def read(path):"
REFERENCES = ["alpha beta gamma", "", "delta epsilon zeta eta theta", "x"]
OTHERS = ["theta", "a much longer reference of several words", "", "\x00\x01"]
B, T = 4, 6


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> Prompts:
    return prompts_for(tokenizer, QUERY, 64, T, 24)


@pytest.fixture(scope="module")
def weights() -> Any:
    return folded(PRIVATE, endless(tiny_params(PRIVATE, 1)))


# ---- lanes


@pytest.mark.parametrize(
    "config", [pytest.param(PRIVATE, marks=pytest.mark.slow), LLAMA], ids=["gpt2", "llama"]
)
def test_lanes_are_the_model(config: ModelConfig) -> None:
    """Prompts of unlike lengths, and what follows them, against the whole sequence at once."""
    params = tiny_params(config, 3)
    lanes = Lanes(config, folded(config, params), 2, 9, 3)
    rows = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7]]
    collected = [lanes.begin(rows), lanes.step(11), lanes.step([12, 13])]
    whole = [[*row, 11, last] for row, last in zip(rows, (12, 13), strict=True)]
    for i, row in enumerate(whole):
        expected = np.asarray(logits(params, config, jnp.array(row)))[-3:]
        np.testing.assert_allclose([step[i] for step in collected], expected, atol=2e-4, rtol=1e-4)
    assert lanes.calls == 6
    lanes.step(1)
    with pytest.raises(ValueError, match="room for 3 new tokens"):
        lanes.step(1)
    with pytest.raises(ValueError, match="2 prompts of 1 to 9"):
        lanes.begin([[1], []])
    with pytest.raises(ValueError, match="do not fit"):
        Lanes(config, None, 1, 60, 5)


def test_a_row_depends_on_its_own_prompt_alone(weights: Any, prompts: Prompts) -> None:
    def run(references: Sequence[str]) -> list[np.ndarray]:
        lanes = Lanes(PRIVATE, weights, B, prompts.room, T)
        rows = prompts.lanes(references, B)
        return [lanes.begin(rows), lanes.step(4), lanes.step(5)]

    one, other = run(REFERENCES), run([REFERENCES[0], *OTHERS[1:]])
    for a, b in zip(one, other, strict=True):
        assert a[0].tobytes() == b[0].tobytes()  # the first is the same reference
        assert (a[2] != b[2]).any()


def test_the_head_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of weights that are stored in bfloat16. Computed in that, logits of the usual size are
    off by more than C / B = 0.012 of epsilon 1 (table 12).
    """
    params = tiny_params(PRIVATE, 1)
    params["ln_f"]["gain"] = params["ln_f"]["gain"] * 12
    full = folded(PRIVATE, params)
    stored = {**full, "head": jax.tree.map(lambda w: w.astype(jnp.bfloat16), full["head"])}
    same = {**full, "head": jax.tree.map(lambda w: w.astype(jnp.float32), stored["head"])}

    def run(weights: Any) -> np.ndarray:
        return Lanes(PRIVATE, weights, 1, 5, 1).begin([list(range(5))])

    exact = run(same)
    assert 10 < np.abs(exact).max() < 40 and exact.dtype == np.float32
    assert np.abs(run(stored) - exact).max() < 1e-4
    monkeypatch.setattr(lanes_module, "HEAD", jnp.bfloat16)
    assert np.abs(run(stored) - exact).max() > 0.012


def test_a_prefix_is_computed_once(weights: Any) -> None:
    """Prompts that begin alike have the logits that they have without the prefix apart."""
    rows = [[5, 6, 7, 8, 9], [5, 6, 7], [5, 6, 1, 2]]
    plain, begun = (Lanes(PRIVATE, weights, 3, 6, 2, prefix) for prefix in ((), (5, 6)))
    for _ in range(2):
        for one, other in (
            (plain.begin(rows), begun.begin(rows)),
            (plain.step([1, 2, 3]), begun.step([1, 2, 3])),
        ):
            np.testing.assert_allclose(one, other, atol=1e-4)
    with pytest.raises(ValueError, match="3 prompts of 3 to 6"):
        begun.begin([*rows[:2], [5, 6]])
    with pytest.raises(ValueError, match="does not begin with the prefix"):
        begun.begin([*rows[:2], [5, 7, 6]])


def test_features_are_of_a_text_alone(weights: Any) -> None:
    features = Features(PRIVATE, weights, 2, 8)
    actual = features.of([[1, 2, 3], [4], [], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
    assert actual.shape == (4, 16)
    np.testing.assert_allclose(np.linalg.norm(actual, axis=1), [1, 1, 0, 1], atol=1e-5)
    assert features.of([[4], [1, 2, 3]])[1].tobytes() == actual[0].tobytes()


# ---- public logits


def scripted(seen: list[bytes], tokens: Sequence[int], lanes: int = B) -> Method:
    """Return a method that looks at phi_pub and says what it was told to."""

    def begin(present: np.ndarray, prg: Prg) -> Next:
        left = list(tokens)

        def token(public: np.ndarray, private: np.ndarray) -> int | None:
            seen.append(public.tobytes())
            return left.pop(0) if left else None

        return token

    return Method("scripted", lanes, T, dp_event.NoOpDpEvent(), begin, {})


def public_bits(weights: Any, prompts: Prompts, references: Sequence[str]) -> list[bytes]:
    seen: list[bytes] = []
    generator = Generator(scripted(seen, [3, 9, 4]), PRIVATE, weights, prompts)
    generator.text(references, Prg.from_os())
    return seen


def left_padded_together(weights: Any, prompts: Prompts, references: Sequence[str]) -> list[bytes]:
    """Broken: the public prompt in one batch with the references, padded on the left to the longest
    of them.
    """
    rows = [prompts.public, *prompts.lanes(references, B)]
    longest = max(map(len, rows))
    lanes = Lanes(PRIVATE, weights, B + 1, longest, T)
    collected = [lanes.begin([[0] * (longest - len(row)) + row for row in rows])]
    collected += [lanes.step(token) for token in (3, 9, 4)]
    return [logits[0].tobytes() for logits in collected]


Bits = Callable[[Any, Prompts, Sequence[str]], list[bytes]]


@pytest.mark.parametrize("bits, same", [(public_bits, True), (left_padded_together, False)])
def test_public_logits_do_not_depend_on_references(
    weights: Any, prompts: Prompts, bits: Bits, same: bool
) -> None:
    one = bits(weights, prompts, REFERENCES)
    assert len(one) == 4
    for others in (OTHERS, REFERENCES[:1], ["z" * 500] * 4, []):
        assert (bits(weights, prompts, others) == one) == same


# ---- the driver


def test_without_references_a_text_is_the_public_model_s(weights: Any, prompts: Prompts) -> None:
    """All null, and short batches, come to the same draws as the public model alone; with C = 0,
    whatever the references are.
    """
    p = Parameters(B, 2.0, 1.0, T, 30)
    zero = Parameters(B, 0.0, 1.0, T, 30)

    def tokens(method: Method, references: Sequence[str]) -> list[int]:
        generator = Generator(method, PRIVATE, weights, prompts)
        return generator.text(references, Prg.from_seed(4, "text")).tokens

    plain = tokens(public_only(zero), [])
    assert len(plain) == T
    assert tokens(invisible_ink(zero), REFERENCES) == plain
    # Slack 2 C / B lets in more candidates than the plain top-k has.
    full = Parameters(B, 2.0, 1.0, T, None)
    everything = tokens(public_only(full), [])
    for references in ([], ["", ""], [""] * B):
        assert tokens(invisible_ink(full), references) == everything
    assert tokens(invisible_ink(p), REFERENCES) != tokens(invisible_ink(p), [])


def test_the_end_of_a_text_is_an_ordinary_token(weights: Any, prompts: Prompts) -> None:
    end = min(prompts.tokenizer.eos_ids)
    heard: list[int] = []
    cases: list[tuple[list[int], Made]] = [
        ([5, end, 7], Made([5], True)),
        ([end], Made([], True)),
        ([5, 6], Made([5, 6], False)),  # the method gives no more
        (list(range(1, 9)), Made(list(range(1, T + 1)), False)),
    ]
    for said, expected in cases:
        generator = Generator(scripted([], said), PRIVATE, weights, prompts)
        assert generator.text(REFERENCES, Prg.from_os(), heard.append) == expected
    assert heard == [1, 1, 2, *range(1, T + 1)]
    # B + 1 calls of the model a token.
    assert generator.calls == (B + 1) * T


def test_texts_together_are_the_texts_alone(weights: Any, prompts: Prompts) -> None:
    """Each of several texts that end at different lengths has the tokens that its references alone
    give it, whatever stands beside it; calls are counted while a text lasts.
    """
    parts = [REFERENCES, OTHERS, [], REFERENCES[:1]]
    ends = (2, T, 4, 0)

    def likeliest(texts: Iterator[int]) -> Method:
        def begin(present: np.ndarray, prg: Prg) -> Next:
            left = ends[next(texts)]

            def token(public: np.ndarray, private: np.ndarray) -> int | None:
                nonlocal left
                left -= 1
                mean = public + np.where(present[:, None], private - public, 0).sum(axis=0)
                return int(mean[1:].argmax()) + 1 if left >= 0 else None

            return token

        return Method("likeliest", B, T, dp_event.NoOpDpEvent(), begin, {})

    def texts(at_once: int, order: Sequence[int]) -> list[list[int]]:
        generator = Generator(likeliest(iter(order)), PRIVATE, weights, prompts, None, at_once)
        made = []
        for start in range(0, len(order), at_once):
            some = [parts[i] for i in order[start : start + at_once]]
            made += generator.texts(some, Prg.from_os())
        lasted = [min(ends[i] + 1, T) for i in order]
        assert generator.calls == (B + 1) * sum(lasted)
        return [one.tokens for one in made]

    alone = texts(1, [0, 1, 2, 3])
    assert [len(tokens) for tokens in alone] == list(ends)
    assert len({tuple(tokens[:2]) for tokens in alone[:3]}) == 3
    assert texts(3, [0, 1, 2, 3]) == alone
    assert texts(4, [3, 1, 0, 2]) == [alone[i] for i in (3, 1, 0, 2)]
    with pytest.raises(ValueError, match="2 texts where 1"):
        Generator(likeliest(iter([0, 1])), PRIVATE, weights, prompts).texts(
            parts[:2], Prg.from_os()
        )


def test_each_text_draws_from_a_stream_of_its_own(weights: Any, prompts: Prompts) -> None:
    """Texts of the same references differ, together and one after the other; how far one goes moves
    no draw of another.
    """
    p = Parameters(B, 2.0, 1.0, T, 30)

    def texts(lasts: Sequence[int]) -> list[list[int]]:
        left = iter(lasts)
        plain = invisible_ink(p)

        def begin(present: np.ndarray, prg: Prg) -> Next:
            token, rounds = plain.begin(present, prg), next(left)

            def until(public: np.ndarray, private: np.ndarray) -> int | None:
                nonlocal rounds
                rounds -= 1
                return token(public, private) if rounds >= 0 else None

            return until

        generator = Generator(replace(plain, begin=begin), PRIVATE, weights, prompts, None, 2)
        prg = Prg.from_seed(5, "texts")
        made = generator.texts([REFERENCES] * 2, prg) + generator.texts([REFERENCES] * 2, prg)
        return [one.tokens for one in made]

    whole = texts([T, T, T, T])
    assert len(set(map(tuple, whole))) == 4
    assert texts([2, T, 0, T]) == [whole[0][:2], whole[1], [], whole[3]]


def test_the_end_comes_with_its_probability(weights: Any, prompts: Prompts) -> None:
    """A text ends when, and only when, the end is drawn: logits that leave nothing else."""
    end = min(prompts.tokenizer.eos_ids)
    method = invisible_ink(Parameters(B, 1.0, 1.0, T, 3))
    public = np.full(288, -50.0, np.float32)
    public[end] = 50.0
    token = method.begin(np.ones(B, bool), Prg.from_os())
    assert token(public, np.tile(public, (B, 1))) == end


def test_batches_are_by_place_alone(weights: Any, prompts: Prompts) -> None:
    generator = Generator(scripted([], [], 2), PRIVATE, weights, prompts)
    with pytest.raises(ValueError, match="3 references in a batch of 2"):
        generator.text(["a", "b", "c"], Prg.from_os())
    assert batches(list("abcde"), 2) == [["a", "b"], ["c", "d"], ["e"]]


# ---- prompts


def test_prompts(tokenizer: Tokenizer) -> None:
    prompts = prompts_for(tokenizer, QUERY, 64, 8)
    begin, query = prompts.begin, tokenizer.encode(QUERY)
    assert begin == [min(tokenizer.eos_ids)] and prompts.public == begin + query
    assert tokenizer.decode(prompts.private("alpha")) == f"alpha\n\n\n{QUERY}"
    longest = prompts.private("zq" * 100)
    assert len(longest) == prompts.room == 64 - 8 and longest[-len(query) :] == query
    # An empty reference before the query would not be the public prompt.
    assert prompts.private("") != prompts.public
    assert len({*map(tuple, prompts.lanes(["", ""], 4))}) == 1


@pytest.mark.parametrize("asked", [None, 4, 100])
def test_prompts_that_do_not_fit_are_refused(tokenizer: Tokenizer, asked: int | None) -> None:
    new = 8 if asked else 50
    with pytest.raises(InputError, match="the model has 64 positions"):
        prompts_for(tokenizer, QUERY, 64, new, asked)


BAD = {
    "missing": None,
    "empty": b"",
    "no json": b'{"text": "a"}\nsecret\n',
    "no text": b'{"words": "secret"}\n',
    "a number": b'{"text": 3}\n',
    "a list": b'["secret"]\n',
    "no utf-8": b'{"text": "\xff secret"}\n',
    "half a pair": b'{"text": "secret \\ud800"}\n',
    "too deep": b"[" * 100_000 + b"\n",
    "a gap": b'{"text": "secret"}\n\n{"text": "b"}\n',
}


@pytest.mark.parametrize("data", BAD.values(), ids=list(BAD))
def test_references_that_cannot_be_read(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "references.jsonl"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InputError, match="references.jsonl") as error:
        read_references(path)
    assert "secret" not in str(error.value)


def test_references_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"text": "a\u2028b", "more": 1}\n{"text": ""}', encoding="utf-8")
    assert read_references(path) == ["a\u2028b", ""]
