"""Alignment: what a private model answers, beside its own logits, and a student of the answers."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from scipy.stats import chi2

from models.alignment import fitting, scripts, student
from models.alignment.answers import Answer, Begun, Origin, begun_of, read_answers, write_part
from models.alignment.fitting import Point, Run, Settings
from models.alignment.run import ask, halves
from models.alignment.student import Student
from models.alignment.writing import Drawn, Given, Lane, Script, Scripts, Writer, rows_of
from models.chat import Message, Template
from models.encoder_decoder import source_logits
from models.family import ModelConfig, family_of, logits
from models.gpt2 import GPT2Config
from models.hf import save_model
from models.llama import LlamaConfig
from models.t5 import T5Config
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from tests.kit.models import save_tokenizer

V = 40
END = frozenset({0})
LENGTHS = [25, 20, 9, 25, 8, 14, 14, 25, 6, 11, 25, 25, 7, 16, 22, 10]  # of texts, in tokens
CONFIGS: list[ModelConfig] = [
    GPT2Config(V, n_positions=32, n_embd=8, n_layer=2, n_head=2),
    LlamaConfig(V, 32, 8, 16, 2, 2, 1),
]
T5_CONFIG = T5Config(V, 8, 4, 12, 1, 2, 2, n_positions=32)
ORIGIN = Origin("model", "asked", "tokenizer", 1.0, 5)
ORIGIN_OF_ALL = replace(ORIGIN, top_k=V)
SETTINGS = Settings(
    epochs=3,
    batch=128,
    learning_rate=2e-2,
    rejection=2.0,
    measured_every=4,
    patience=99,
    temperature=1.0,
    seed=0,
)


def params_of(config: ModelConfig, seed: int = 0) -> Any:
    """Return random parameters whose distributions are far from flat."""
    drawn = family_of(config).init(config, jax.random.key(seed))
    return jax.tree.map(lambda w: np.asarray(16 * w if w.ndim > 1 else w), drawn)


@functools.partial(jax.jit, static_argnums=1)
def _padded_logits(params: Any, config: ModelConfig, tokens: Any) -> Any:
    return logits(params, config, tokens)


def logits_of(params: Any, config: ModelConfig, tokens: Any) -> np.ndarray:
    """Return a text's logits [token, V]. What follows it changes none of them, and so texts of all
    lengths take one compiled program.
    """
    padded = np.pad(tokens, (0, config.context - len(tokens)))
    return np.asarray(_padded_logits(params, config, jnp.asarray(padded)))[: len(tokens)]


def writer(config: ModelConfig, *, top_k: int = V, temperature: float = 1.0) -> Writer:
    return Writer(config, params_of(config), END, 4, 24, top_k, temperature)


def texts_of(made: Writer, scripts: Iterator[Script], seed: int = 0) -> list[Answer]:
    return made.round(Scripts(scripts), seed)


def answers_of(config: ModelConfig, rounds: int = 4, top_k: int = V) -> list[Answer]:
    made = writer(config, top_k=top_k)
    texts = itertools.repeat((Given([7]), Drawn(20)))
    return [one for seed in range(rounds) for one in texts_of(made, texts, seed)]


# ---- what the private model answers


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


# ---- the student


@pytest.mark.slow
def test_a_model_accepts_all_that_it_answered(tmp_path: Path) -> None:
    """And another one as much as the sum of the least of both distributions: its own logits."""
    config = CONFIGS[1]
    answers = answers_of(config)
    for seed in (0, 1):
        params = params_of(config, seed)
        measure = fitting.measure_of(config, SETTINGS)
        sums = sum(
            np.asarray(measure(params, fitting.padded([one], 64, 2).arrays())) for one in answers
        )
        wanted = []
        for one in answers:
            places = np.flatnonzero(one.counts) - 1
            q = np.asarray(jax.nn.softmax(logits_of(params, config, one.tokens)))[places]
            p = np.zeros_like(q)
            np.put_along_axis(p, one.ids, np.exp(one.log_p), axis=1)
            wanted += [
                (np.minimum(p, q).sum(), row.argmax() == ids[0])
                for p, q, row, ids in zip(p, q, q, one.ids, strict=True)
            ]
        accepted, same = np.mean(wanted, axis=0)
        assert np.asarray(sums)[2] == len(wanted)
        np.testing.assert_allclose(np.asarray(sums)[:2] / len(wanted), [accepted, same], atol=1e-4)
        assert (accepted > 0.999) == (seed == 0)


def test_the_loss_is_least_for_the_model_itself() -> None:
    """Its gradient is zero there, with all of the vocabulary: no student does better. The rejection
    loss, which has a kink there, is zero itself.
    """
    config = CONFIGS[0]
    loss = jax.jit(fitting.loss_of(config, replace(SETTINGS, rejection=0.0)))
    whole = fitting.padded(answers_of(config)[:4], 64, 4)
    batch, part = fitting.narrowed(whole, V, np.random.default_rng(0))
    assert sorted(part.tokens) == list(range(V)) and not part.log_weights.any()
    of_batch = batch.arrays(), part.arrays()
    params, other = params_of(config), params_of(config, 1)
    gradient = jax.jit(jax.grad(loss))(params, *of_batch)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) < 1e-3
    with_rejection = jax.jit(fitting.loss_of(config, replace(SETTINGS, rejection=2.0)))
    assert abs(float(with_rejection(params, *of_batch) - loss(params, *of_batch))) < 1e-3
    assert float(loss(params, *of_batch)) < float(loss(other, *of_batch)) - 0.5
    assert float(with_rejection(other, *of_batch)) > float(loss(other, *of_batch)) + 0.5


@pytest.mark.parametrize("config", [*CONFIGS, T5_CONFIG], ids=lambda config: config.family)
def test_a_step_knows_a_part_of_the_vocabulary(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities differ from the whole model's by one number a place, what is said of the
    sum over tokens that the batch has not: on average over draws, the sum is right.
    """
    monkeypatch.setattr(fitting, "_SOME", 4)
    monkeypatch.setattr(fitting, "_OTHERS", 6)
    answers = t5_answers() if config.encodes else answers_of(config, top_k=5)
    some = [replace(one, ids=one.ids[:, :5] % 11, log_p=one.log_p[:, :5]) for one in answers]
    whole = fitting.padded([replace(one, tokens=one.tokens % 13) for one in some[:2]], 64, 2)
    params = params_of(config)
    counted = whole.counts > 0
    logits = np.asarray(fitting._logits(params, config, SETTINGS, whole.arrays()))[counted]
    ids = whole.ids[counted]
    draw, ratios = np.random.default_rng(2), []
    of_part = jax.jit(
        lambda tokens, batch: fitting._logits(
            *fitting._of_part(params, config, tokens), SETTINGS, batch
        )
    )
    for _ in range(200):
        batch, part = fitting.narrowed(whole, V, draw)
        assert len(part.tokens) == len(set(part.tokens.tolist())) < V
        assert len(part.tokens) % 4 == 0 and (part.tokens[batch.ids] == whole.ids).all()
        assert (part.tokens[batch.tokens] == whole.tokens).all()
        narrow = np.asarray(of_part(part.tokens, batch.arrays()))[counted]
        shift = np.take_along_axis(narrow, batch.ids[counted], 1) - np.take_along_axis(
            logits, ids, 1
        )
        np.testing.assert_allclose(shift, shift[:, :1] * np.ones(5), atol=2e-3)
        sums = np.exp(narrow - shift[:, :1] + part.log_weights).sum(axis=1)
        ratios.append(sums / np.exp(logits).sum(axis=1))
    spread = np.std(ratios, axis=0) / np.sqrt(len(ratios))
    assert spread.max() > 1e-3
    assert (np.abs(np.mean(ratios, axis=0) - 1) < 6 * spread + 1e-4).all()


def fitted(
    folder: Path, *, until: int | None = None, settings: Settings = SETTINGS, blocks: int = 1
) -> tuple[Any, Run]:
    """Align a student of one block; end it after so many steps."""
    config = CONFIGS[1]
    learnt, held_out = halves(answers_of(config, rounds=8))
    begun = student.from_nothing(config, blocks, None, 5)

    def say(words: str) -> None:
        if until is not None and words.startswith(f"step {until} of"):
            raise KeyboardInterrupt

    return fitting.fit(begun, learnt, held_out, settings, folder, say)


def test_a_student_learns(tmp_path: Path) -> None:
    params, run = fitted(tmp_path)
    assert run.best.acceptance > run.curve[0].acceptance + 0.1
    assert run.curve[0].loss is None and run.curve[-1].loss < run.curve[1].loss  # type: ignore[operator]
    tokens = [point.tokens for point in run.curve]
    assert tokens == sorted(tokens) and tokens[0] == 0


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    wanted, whole = fitted(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "parts", until=40)
    kept = json.loads((tmp_path / "parts" / "run.json").read_text())
    assert 0 < kept["done"] < 40
    actual, parts = fitted(tmp_path / "parts")
    assert [replace(p, seconds=0) for p in parts.curve] == [
        replace(p, seconds=0) for p in whole.curve
    ]
    jax.tree.map(np.testing.assert_array_equal, actual, wanted)
    again, _ = fitted(tmp_path / "parts")  # nothing is left to do
    jax.tree.map(np.testing.assert_array_equal, again, wanted)
    with pytest.raises(InputError, match="another learning_rate"):
        fitted(tmp_path / "parts", settings=replace(SETTINGS, learning_rate=1e-3))
    with pytest.raises(InputError, match="another student"):
        fitted(tmp_path / "parts", blocks=2)
    for name in ("run.json", json.loads((tmp_path / "parts/run.json").read_text())["state"]):
        path = tmp_path / "parts" / name
        kept_bytes = path.read_bytes()
        path.write_bytes(kept_bytes[:-9])
        with pytest.raises(InputError, match=r"cannot be read; remove .*parts"):
            fitted(tmp_path / "parts")
        path.write_bytes(kept_bytes)


def test_the_start_is_kept_where_nothing_is_better(tmp_path: Path) -> None:
    """And when the run is repeated."""
    config = CONFIGS[1]
    learnt, held_out = halves(answers_of(config))
    wild = replace(SETTINGS, learning_rate=1.0)
    private = params_of(config)
    for _ in range(2):
        params, run = fitting.fit(
            Student(config, private), learnt, held_out, wild, tmp_path, lambda words: None
        )
        assert run.best.step == 0 and run.best.acceptance > 0.999
        jax.tree.map(np.testing.assert_array_equal, params, private)


def curve(*acceptances: float) -> Run:
    return Run([Point(i, i, None, a, a, 0.0) for i, a in enumerate(acceptances)])


def test_a_run_is_over_when_acceptance_stops_growing() -> None:
    assert not curve(0.1, 0.2, 0.2).is_over(2)
    assert curve(0.1, 0.2, 0.2, 0.2).is_over(2)
    assert curve(0.1, 0.2, 0.2005, 0.2009).is_over(2)
    assert not curve(0.1, 0.2, 0.2005, 0.22).is_over(2)
    assert curve(0.1, 0.3, 0.2).best.step == 1


def test_what_stays_is_not_changed(tmp_path: Path) -> None:
    config = CONFIGS[1]
    private = params_of(config)
    kept = student.of_blocks(config, private, [1])
    assert kept.fixed == {"embed", "head"} and kept.config.layers == 1
    learnt, held_out = halves(answers_of(config))
    params, _ = fitting.fit(kept, learnt, held_out, SETTINGS, tmp_path, lambda words: None)
    for name in kept.fixed:
        np.testing.assert_array_equal(params[name], private[name])
    assert np.abs(params["blocks"][0]["q"] - private["blocks"][1]["q"]).max() > 0
    with pytest.raises(InputError, match="blocks of the private model, 0 to 1, found 2"):
        student.of_blocks(config, private, [2])


def test_tables_of_the_private_model_stay(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Also in a draft model that is aligned again, and no other model's."""
    config = replace(CONFIGS[1], vocab_size=tokenizer.vocab_size)
    private, others = params_of(config), params_of(config, 1)
    kept = student.of_blocks(config, private, [1])
    mixed = {**kept.params, "head": others["head"]}
    for name, params in (("kept", kept.params), ("mixed", mixed)):
        save_model(tmp_path / name, kept.config, params)
        save_tokenizer(tmp_path / name)
    for name, fixed in (("kept", {"embed", "head"}), ("mixed", {"embed"})):
        again = student.of_public(tmp_path / name, tokenizer.digest, encodes=False)
        rounded = jax.tree.map(lambda w: np.float32(np.float16(w)), private)
        assert student.sharing(again, rounded).fixed == fixed and not again.fixed


def test_a_student_may_be_narrower() -> None:
    llama = LlamaConfig(V, 32, 48, 96, 2, 6, 3)
    narrow = student.from_nothing(llama, 1, 16, 0)
    config: Any = narrow.config
    sizes = config.hidden_size, config.intermediate_size, config.num_attention_heads
    assert sizes == (16, 32, 2) and config.num_key_value_heads == 1 and config.head_dim == 8
    assert narrow.params["blocks"][0]["q"].shape == (16, 16)
    with pytest.raises(InputError, match="a multiple of 16, .* found 20"):
        student.from_nothing(llama, 1, 20, 0)


def test_a_student_has_the_private_models_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = GPT2Config(288, n_positions=32, n_embd=8, n_layer=1, n_head=2)
    save_model(tmp_path, config, params_of(config))
    save_tokenizer(tmp_path)
    assert isinstance(student.of_public(tmp_path, tokenizer.digest, False), Student)
    with pytest.raises(InputError, match="has another tokenizer"):
        student.of_public(tmp_path, "other", False)
    with pytest.raises(InputError, match="needs a draft model with an encoder"):
        student.of_public(tmp_path, tokenizer.digest, True)


# ---- a model with an encoder


def t5_answers(count: int = 30, texts_of_lanes: int = 4) -> list[Answer]:
    made = Writer(T5_CONFIG, params_of(T5_CONFIG), END, texts_of_lanes, 9, V, 1.0)
    texts = scripts.of_sources([1 + i % 39 for i in range(6 * count + 5)], 6, (1, 0))
    assert len(texts) == count
    waiting, answers = Scripts(iter(texts)), []
    for seed in range(count):
        answers += made.round(waiting, seed)
    assert waiting.is_over
    return answers


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


@pytest.mark.slow
def test_an_encoders_answers_are_kept_and_learnt(tmp_path: Path) -> None:
    answers = t5_answers()
    write_part(tmp_path, "given", Begun(1, 7, 9), answers, ORIGIN_OF_ALL)
    read, _ = read_answers(tmp_path)
    assert [one.tokens.tolist() for one in read] == [one.tokens.tolist() for one in answers]
    assert {one.source for one in read} == {7}
    measure = fitting.measure_of(T5_CONFIG, SETTINGS)
    batch = fitting.padded(answers[:3], 64, 4).arrays()
    accepted, same, places = measure(params_of(T5_CONFIG), batch)
    assert places == sum(len(one.ids) for one in answers[:3])
    np.testing.assert_allclose([accepted, same], [places, places], rtol=1e-4)
    learnt, held_out = halves(read)
    begun = student.from_nothing(T5_CONFIG, 1, 4, 5)
    assert (begun.config.num_layers, begun.config.num_decoder_layers) == (1, 1)  # type: ignore[attr-defined]
    _, run = fitting.fit(begun, learnt, held_out, SETTINGS, tmp_path / "run", lambda words: None)
    assert run.best.acceptance > run.curve[0].acceptance + 0.05
    with pytest.raises(InputError, match="--keep is for models without an encoder"):
        student.of_blocks(T5_CONFIG, params_of(T5_CONFIG), [0])
