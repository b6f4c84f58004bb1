"""A student of a private model's answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.alignment import fitting, student
from models.alignment.answers import Begun, read_answers, write_part
from models.alignment.fitting import Point, Run, Settings
from models.alignment.run import halves
from models.alignment.student import Student
from models.family import ModelConfig
from models.gpt2 import GPT2Config
from models.hf import save_model
from models.llama import LlamaConfig
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from tests.kit.answers import (
    CONFIGS,
    ORIGIN_OF_ALL,
    T5_CONFIG,
    V,
    answers_of,
    logits_of,
    params_of,
    t5_answers,
)
from tests.kit.models import save_tokenizer

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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


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
    measured = whole.curve[1].step
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "parts", until=measured + 3)
    kept = json.loads((tmp_path / "parts" / "run.json").read_text())
    assert kept["done"] == measured
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
