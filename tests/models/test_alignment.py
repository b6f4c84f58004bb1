"""Alignment: what a private model answers, beside its own logits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from scipy.stats import chi2

from models.alignment import scripts, writing
from models.alignment.answers import Begun, begun_of, read_answers, write_part
from models.alignment.run import ask, halves
from models.alignment.writing import Drawn, Given, Lane, Script, Scripts, Source, rows_of
from models.chat import Message, Template
from models.encoder_decoder import source_logits
from models.family import ModelConfig, logits
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from tests.kit.answers import (
    CONFIGS,
    END,
    ORIGIN,
    T5_CONFIG,
    V,
    answers_of,
    logits_of,
    params_of,
    t5_answers,
    texts_of,
    writer,
)
from tests.kit.models import save_tokenizer

LENGTHS = [25, 20, 9, 25, 8, 14, 14, 25, 6, 11, 25, 25, 7, 16, 22, 10]  # of texts, in tokens


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_answers_are_the_models_distributions(config: ModelConfig, temperature: float) -> None:
    """At every place that counts, whichever lane and row of the cache a text stands in."""
    made = writer(config, temperature=temperature)
    texts: Iterator[Script] = itertools.cycle(
        [(Given([3, 4]), Drawn(4)), (Given([5, 6, 9], counts=True), Drawn(2)), (Given([8]),)]
    )
    answers = texts_of(made, texts)
    assert len(answers) > 8  # of four lanes, so most began after others in their lane
    for answer in answers:
        z = logits_of(made.params, config, answer.tokens) / temperature
        log_p = np.asarray(jax.nn.log_softmax(z))[np.flatnonzero(answer.counts) - 1]
        assert answer.counts.sum() == len(answer.ids) and not answer.counts[0]
        np.testing.assert_allclose(
            np.take_along_axis(log_p, answer.ids, axis=1), answer.log_p, atol=2e-4
        )
        assert (np.diff(answer.log_p, axis=1) <= 0).all()
        assert (np.sort(answer.ids, axis=1) == np.arange(V)).all()


def test_tokens_are_drawn_from_the_models_distribution() -> None:
    """The first token of 1,920 texts; chi-squared, a false alarm in ten thousand runs."""
    config = CONFIGS[0]
    made = replace(writer(config), ends=frozenset())
    texts = [
        one
        for seed in range(120)
        for one in texts_of(made, itertools.repeat((Given([7]), Drawn(5)), 16), seed)
    ]
    wanted = np.asarray(jax.nn.softmax(logits(made.params, config, jnp.array([7]))[0])) * 1920
    counts = np.bincount([one.tokens[1] for one in texts], minlength=V)
    assert counts.sum() == 1920
    often = wanted > 5
    statistic = float(((counts - wanted)[often] ** 2 / wanted[often]).sum())
    assert chi2.sf(statistic, often.sum()) > 1e-4


@pytest.mark.parametrize("config", [*CONFIGS, T5_CONFIG], ids=lambda config: config.family)
def test_texts_do_not_depend_on_how_the_cache_grows(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for growth in (4, 64):
        monkeypatch.setattr(writing, "_GROWTH", growth)
        script = (Source([3, 4, 0]), Given([1])) if config.encodes else (Given([3, 4]),)
        answers = texts_of(writer(config), itertools.repeat((*script, Drawn(12))), 1)
        texts.append([(one.tokens.tolist(), one.log_p.round(3).tolist()) for one in answers])
    assert texts[0] == texts[1] and max(len(tokens) for tokens, _ in texts[0]) > 8


def test_a_round_repeats_and_ends_with_its_scripts() -> None:
    made = writer(CONFIGS[1])
    texts: list[Script] = [(Given([i]), Drawn(30)) for i in range(1, 6)]

    def run(seed: int) -> list[list[int]]:
        return [one.tokens.tolist() for one in texts_of(made, iter(texts), seed)]

    assert run(1) == run(1) != run(2)
    assert {one[0] for one in run(1)} <= set(range(1, 6))
    assert texts_of(made, iter([])) == []
    assert all(len(one) <= 25 for one in run(3))  # cut where the cache is full


def test_a_script_waits_until_it_fits() -> None:
    """All that is given is answered, and in its order."""
    made = writer(CONFIGS[0])
    texts: list[Script] = [(Given([i, *range(1, n)], counts=True),) for i, n in enumerate(LENGTHS)]
    waiting, answers = Scripts(iter(texts)), []
    for seed in range(30):
        answers += made.round(waiting, seed)
    assert waiting.is_over and waiting.begun == len(texts)
    firsts = {int(one.tokens[0]): len(one.tokens) for one in answers}
    assert firsts == dict(enumerate(LENGTHS))
    assert [rows_of(script) for script in texts] == [n - 1 for n in LENGTHS]
    assert rows_of((Given([1, 2]), Drawn(9), Given([3]), Drawn(9))) == 2 + 4


# ---- scripts


def written(script: Script, draws: list[int]) -> Lane:
    """Return a text whose draws are these."""
    lane, left = Lane(script, 0), iter(draws)
    while lane.open():
        drawn = next(left) if isinstance(script[lane._part], Drawn) else -1
        lane.goes_on(np.array([drawn]), np.array([0.0]), drawn, END)
    return lane


def test_an_end_of_text_before_more_gives_way_to_it() -> None:
    script = (Given([1, 2]), Drawn(4, counts=False), Given([9, 8]), Drawn(4))
    lane = written(script, [5, 6, 0, 7, 0])
    assert lane.tokens == [1, 2, 5, 6, 9, 8, 7, 0]
    assert lane.counts == [False] * 6 + [True, True]
    lane = written(script, [5, 6, 7, 8, 3, 4, 3, 4])  # neither ends by itself
    assert lane.tokens == [1, 2, 5, 6, 7, 8, 9, 8, 3, 4, 3, 4]
    assert lane.answer() is not None
    assert written(script, [0, 3, 0]).answer() is None  # too little of it counts


@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(1, 9), min_size=1, max_size=3).map(Given),
            st.builds(Drawn, st.integers(1, 4), st.booleans()),
        ),
        max_size=5,
    ),
    st.lists(st.integers(0, 9), min_size=20, max_size=20),
)
def test_any_script_keeps_what_is_given(script: list[Given | Drawn], draws: list[int]) -> None:
    lane = written([Given([1]), *script], draws)
    given = [t for part in script if isinstance(part, Given) for t in part.tokens]
    rest = iter(lane.tokens)
    assert all(token in rest for token in given)  # in their order
    assert len(lane.tokens) == len(lane.counts)
    assert sum(lane.counts) == len(lane.ids) == len(lane.log_p)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


TEMPLATE = Template(
    "{% for m in messages %}def {{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "def assistant:",
    eos_token="<|endoftext|>",
)


def test_a_chat_model_asks_itself(tokenizer: Tokenizer) -> None:
    before, question, after, answer = scripts.own(TEMPLATE, tokenizer, 50)
    assert isinstance(before, Given) and isinstance(after, Given)
    assert tokenizer.decode(before.tokens) == "def user: "
    assert after.tokens[0] in tokenizer.eos_ids
    assert tokenizer.decode(after.tokens[1:]) == "\ndef assistant:"
    assert question == Drawn(scripts.LONGEST_QUESTION, counts=False) and answer == Drawn(50)
    assert scripts.own(None, tokenizer, 50) == (Given([0]), Drawn(50))


def test_a_chat_is_answered_anew(tokenizer: Tokenizer) -> None:
    chat = [Message("user", "alpha"), Message("assistant", "beta")]
    for messages in (chat, chat[:1]):
        asked, answer = scripts.of_chat(TEMPLATE, tokenizer, messages, 50)
        assert isinstance(asked, Given) and answer == Drawn(50)
        assert "beta" not in tokenizer.decode(asked.tokens)
    with pytest.raises(InputError, match="give its question"):
        scripts.of_chat(TEMPLATE, tokenizer, chat[1:], 50)


def test_text_is_answered_at_each_token() -> None:
    """And gone on with."""
    wanted = [(Given(range(i, min(i + 4, 10)), counts=True), Drawn(4)) for i in (0, 4, 8)]
    assert scripts.of_text(range(10), 4) == wanted


# ---- files of answers


def test_answers_round_trip(tmp_path: Path) -> None:
    answers = answers_of(CONFIGS[0], top_k=5)
    answers[0].log_p[0, -1] = -1e9  # of a low temperature
    write_part(tmp_path, "own", Begun(1, 7, 9), answers[:3], ORIGIN)
    write_part(tmp_path, "own", Begun(2, 11, 30), answers[3:], ORIGIN)
    assert begun_of(tmp_path, "own", ORIGIN) == Begun(2, 11, 30)
    assert begun_of(tmp_path, "given", ORIGIN) == Begun()
    (tmp_path / "own-00000.safetensors").rename(tmp_path / "kept")
    with pytest.raises(InputError, match="lacks own-00000.safetensors"):
        begun_of(tmp_path, "own", ORIGIN)
    (tmp_path / "kept").rename(tmp_path / "own-00000.safetensors")
    read, origin = read_answers(tmp_path)
    assert origin == ORIGIN and len(read) == len(answers)
    for one, other in zip(read, answers, strict=True):
        for name in ("tokens", "counts", "ids"):
            assert (getattr(one, name) == getattr(other, name)).all()
        np.testing.assert_allclose(one.log_p, np.maximum(other.log_p, -6e4), rtol=1e-3)


def test_other_answers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no answers"):
        read_answers(tmp_path)
    answers, begun = answers_of(CONFIGS[0], top_k=5), Begun(1, 7, 9)
    write_part(tmp_path, "own", begun, answers, ORIGIN)
    other = replace(ORIGIN, temperature=0.5, model="other")
    with pytest.raises(InputError, match="with another model, temperature; give the same"):
        begun_of(tmp_path, "own", other)
    write_part(tmp_path, "own", replace(begun, parts=2), answers, other)
    with pytest.raises(InputError, match="several models or settings"):
        read_answers(tmp_path)


@pytest.mark.parametrize("damage", range(9))
def test_damaged_answers_are_refused(tmp_path: Path, damage: int) -> None:
    answers, path = answers_of(CONFIGS[0], top_k=5), tmp_path / "own-00000.safetensors"
    write_part(tmp_path, "own", Begun(1, 7, 9), answers, ORIGIN)
    if damage < 3:
        path.write_bytes([b"", b"\0" * 64, path.read_bytes()[:-9]][damage])
    else:
        with safe_open(path, "np") as part:
            metadata = part.metadata()
        stored = load_file(path)
        changes: list[dict[str, np.ndarray]] = [
            {"lengths": np.array([1, *stored["lengths"][1:]], np.int32)},
            {"ids": stored["ids"].astype(np.int64)},
            {"tokens": -stored["tokens"]},
            {"counts": np.ones_like(stored["counts"])},
            {"log_p": stored["log_p"] * np.float16(np.nan)},
            {"sources": stored["lengths"] - 1},
        ]
        save_file({**stored, **changes[damage - 3]}, path, metadata=metadata)
    with pytest.raises(InputError, match="make them again"):
        read_answers(tmp_path)


def test_a_private_model_goes_on_answering_where_it_was(tmp_path: Path) -> None:
    """With no script twice, and none left out."""
    made = replace(writer(CONFIGS[0], top_k=5), ends=frozenset())

    def texts() -> Iterator[Script]:
        return ((Given([1 + i % 39, 1 + i // 39]), Drawn(9)) for i in range(60))

    said: list[str] = []
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ask(made, texts(), "given", ORIGIN, whole, None, 3, said.append)
    assert said[-1].endswith("60 texts")
    ask(made, texts(), "given", ORIGIN, parts, 40, 3, said.append)
    some, _ = read_answers(parts)
    assert 40 <= sum(len(one.ids) for one in some) < 200
    ask(made, texts(), "given", ORIGIN, parts, None, 3, said.append)
    ask(made, texts(), "own", ORIGIN, parts, 1, 3, said.append)  # of another kind: counted apart
    (wanted, _), (actual, _) = map(read_answers, (whole, parts))
    texts_wanted = [one.tokens.tolist() for one in wanted]
    assert [one.tokens.tolist() for one in actual[: len(wanted)]] == texts_wanted
    firsts = [tuple(one.tokens[:2]) for one in wanted]
    assert len(set(firsts)) == len(firsts) == 60 and len(actual) > 60


def test_a_model_that_gives_no_answer_is_refused(tmp_path: Path) -> None:
    made = replace(writer(CONFIGS[0], top_k=5), ends=frozenset(range(V)))
    own: Iterator[Script] = itertools.repeat((Given([7]), Drawn(9)))
    with pytest.raises(InputError, match="gave no answers"):
        ask(made, own, "own", ORIGIN, tmp_path, 100, 0, lambda words: None)


def test_few_texts_cannot_be_split() -> None:
    answers = answers_of(CONFIGS[0])
    assert len(answers) >= 20
    learnt, held_out = halves(answers)
    assert len(held_out) == len(answers) // 20 and len(learnt) + len(held_out) == len(answers)
    with pytest.raises(InputError, match="give at least 20"):
        halves(answers[:19])


def test_an_encoder_reads_the_source_of_an_answer() -> None:
    """In every lane, also where texts are over before others, or lanes have none."""
    answers, params = t5_answers(texts_of_lanes=7), params_of(T5_CONFIG)
    assert len(answers) > 20
    for answer in answers:
        assert answer.source == 7 and answer.tokens[6:8].tolist() == [1, 0]
        assert not answer.counts[:8].any() and answer.counts[8:].all()
        tokens = jnp.asarray(answer.tokens)
        z = np.asarray(source_logits(params, T5_CONFIG, tokens[:7], tokens[7:]))
        log_p = np.asarray(jax.nn.log_softmax(z))[: len(answer.ids)]
        np.testing.assert_allclose(
            np.take_along_axis(log_p, answer.ids, axis=1),
            answer.log_p,
            atol=1e-3,  # down to -70
        )
