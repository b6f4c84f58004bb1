"""T5 in plaintext: logits against `transformers`, buckets of distances, checkpoints, bounds,
ranges, and the draft model's cache.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.calibration import answered, calibrated
from models.draft import Drafter
from models.encoder_decoder import RelativePositions, source_length, source_logits
from models.family import Params, bounds_of, check_ranges, config_from
from models.hf import load_config, load_folded, load_model, load_uncalibrated, save_model
from models.t5 import FAMILY, GATED_GELU, T5Config, fold, init_params
from spu_llm.core.errors import InputError
from tests.kit.models import T5
from tests.models.checkpoints import assert_same, change_config

OLD = T5Config(50, 32, 8, 48, 2, 3, 4)  # ReLU, tied head
FLAN = T5Config(60, 24, 12, 40, 3, 2, 3, feed_forward_proj=GATED_GELU, tie_word_embeddings=False)
FEW = replace(T5, vocab_size=50)  # few buckets, few of them exact
MODELS = {"t5": OLD, "flan": FLAN, "few": FEW}
SOURCE = np.random.default_rng(0).integers(2, 50, size=40)
WRITTEN = np.array([0, *np.random.default_rng(1).integers(2, 50, size=37)])


def random_params(config: T5Config) -> Params:
    """Parameters in which every gain differs from its initial value."""
    key = jax.random.key(0)
    return jax.tree.map(
        lambda w: np.asarray(w + 0.2 * jax.random.normal(key, w.shape)), init_params(config, key)
    )


def whole(params: Params, config: T5Config) -> np.ndarray:
    scores = jax.jit(lambda s, t: source_logits(params, config, s, t))
    return np.asarray(scores(SOURCE, WRITTEN))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """From one directory, whose `config.json` is the library's own."""
    import transformers

    config, params = MODELS[name], random_params(MODELS[name])
    save_model(tmp_path, config, params, dtype=np.float32)
    stated = transformers.T5Config.from_pretrained(tmp_path)
    stated.save_pretrained(tmp_path)
    loaded_config, loaded = load_model(tmp_path, encoders=True)
    assert loaded_config == config == config_from(config.asdict())
    assert_same(loaded, params)
    model = transformers.FlaxT5ForConditionalGeneration.from_pretrained(tmp_path)
    wanted = model(input_ids=SOURCE[None], decoder_input_ids=WRITTEN[None]).logits[0]
    wanted = np.asarray(wanted) - np.mean(wanted, axis=-1, keepdims=True)
    np.testing.assert_allclose(whole(params, config), wanted, atol=1e-4)


@pytest.mark.parametrize("both_ways", [True, False], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 12), (16, 20), (64, 1000)])
def test_buckets_are_those_of_transformers(buckets: int, most: int, both_ways: bool) -> None:
    from transformers.models.t5.modeling_flax_t5 import FlaxT5Attention

    distance = np.arange(-1100, 1101)  # of a row from its query
    wanted = FlaxT5Attention._relative_position_bucket(
        jnp.asarray(distance), both_ways, num_buckets=buckets, max_distance=most
    )
    ours = RelativePositions(buckets, most, both_ways)
    behind = -distance if both_ways else np.maximum(-distance, 0)
    actual = ours.table()[np.minimum(np.abs(behind), most)] + np.where(behind < 0, ours.after, 0)
    np.testing.assert_array_equal(actual, wanted)


def test_names_of_tensors(tmp_path: Path) -> None:
    save_model(tmp_path, OLD, random_params(OLD), dtype=np.float32)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["decoder.block.2.layer.1.EncDecAttention.k.weight"].shape == (32, 32)
    assert stored["encoder.block.1.layer.1.DenseReluDense.wi.weight"].shape == (48, 32)
    assert "lm_head.weight" not in stored and not any("wi_0" in name for name in stored)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"feed_forward_proj": "gated-silu"}, 'feed_forward_proj "gated-silu"; only relu and'),
        ({"is_encoder_decoder": False}, "is_encoder_decoder = false; only true"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings 1; it must be true or false"),
        ({"decoder_start_token_id": 50}, "decoder_start_token_id is no token"),
        ({"decoder_start_token_id": True}, "decoder_start_token_id true; it must be a token's"),
        ({"relative_attention_num_buckets": 6}, "must be a positive multiple of 4"),
        ({"relative_attention_max_distance": 4}, "must be a positive multiple of 4, and"),
        ({"num_layers": 1}, "more layers than 1, the number"),
        ({"num_decoder_layers": 2}, "more layers than 2, the number"),
        ({"num_decoder_layers": 4}, "has no tensor decoder.block.3.layer.0.layer_norm.weight"),
        ({"feed_forward_proj": GATED_GELU}, "has no tensor encoder.block.0.layer.1.DenseRelu"),
        ({"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
        ({"n_positions": 10**9}, "n_positions must be 2 to"),
        ({"n_positions": 1}, "n_positions must be 2 to"),
        ({"relative_attention_num_buckets": 10**6}, "or their buckets"),
    ],
)
def test_config_does_not_fit(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    save_model(tmp_path, OLD, random_params(OLD), dtype=np.float32)
    change_config(tmp_path, **changes)
    with pytest.raises(InputError, match=expected):
        load_model(tmp_path, encoders=True)


def test_an_old_config_lacks_what_follows(tmp_path: Path) -> None:
    save_model(tmp_path, replace(OLD, num_layers=3), random_params(replace(OLD, num_layers=3)))
    change_config(tmp_path, num_decoder_layers=None, n_positions=None, tie_word_embeddings=True)
    assert load_config(tmp_path, encoders=True) == replace(OLD, num_layers=3)


@pytest.mark.parametrize("load", [load_config, load_model, load_folded, load_uncalibrated])
def test_whoever_does_not_ask_for_encoders_gets_none(tmp_path: Path, load: Any) -> None:
    save_model(tmp_path, OLD, random_params(OLD))
    with pytest.raises(InputError, match="a T5 model, whose prompt an encoder reads; this command"):
        load(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_a_draft_model_gives_the_logits_of_the_whole_text(name: str) -> None:
    """Token by token on its cache, and again after rejected drafts."""
    config, params = MODELS[name], random_params(MODELS[name])
    wanted, source = whole(params, config), [int(token) for token in SOURCE]
    drafter = Drafter(config, params, 64, source)
    for length in (1, 2, 20, 3, 38):
        text = [*source, *map(int, WRITTEN[:length])]
        np.testing.assert_allclose(drafter.logits(text), wanted[length - 1], atol=1e-4)


def test_no_activation_passes_its_bound_and_some_come_near() -> None:
    weights = jax.tree.map(np.asarray, fold(random_params(FLAN), FLAN))
    bounds = bounds_of(weights, FLAN).blocks
    assert len(bounds) == FLAN.layers == 5
    d, heads = FLAN.d_model, FLAN.num_heads
    rng = np.random.default_rng(0)

    def rows(matrix: np.ndarray) -> np.ndarray:
        """Normalised rows, the worst for each column among them."""
        x = rng.normal(size=(4000, d))
        x[: matrix.shape[1]] = matrix.T
        return np.asarray(x / np.sqrt(np.mean(x * x, axis=1, keepdims=True)))

    for number, bias in ((0, "encoder_bias"), (4, "bias")):
        bound = bounds[number]
        block = (weights["encoder"] + weights["blocks"])[number]
        inner = block["gate_up"]["weight"]
        gate, up = np.split(rows(inner) @ inner, 2, axis=1)
        assert 0.9 * bound.activation < np.abs(gate).max() <= bound.activation
        added = jax.nn.gelu(gate) * up @ block["down"]["weight"]
        assert np.abs(added).max() <= bound.inner
        query, key, value = np.split(rows(block["qkv"]["weight"]) @ block["qkv"]["weight"], 3, 1)
        scores = [
            np.abs(q[:500] @ k[:500].T).max() + np.abs(weights[bias]).max()
            for q, k in zip(np.split(query, heads, 1), np.split(key, heads, 1), strict=True)
        ]
        assert 0.2 * bound.score < max(scores) <= bound.score
        assert np.abs(value).max() <= bound.value
    across = weights["blocks"][1]
    query = rows(across["cross_q"]["weight"]) @ across["cross_q"]["weight"]
    key, value = np.split(rows(across["cross_kv"]["weight"]) @ across["cross_kv"]["weight"], 2, 1)
    each = zip(np.split(query, heads, 1), np.split(key, heads, 1), strict=True)
    assert max(np.abs(q[:500] @ k[:500].T).max() for q, k in each) <= bounds[4].score
    assert np.abs(value).max() <= bounds[4].value


@pytest.mark.slow
def test_ranges_are_chosen_on_what_the_model_writes() -> None:
    params: Any = random_params(FEW)
    params["embed"] = 300.0 * params["embed"]
    texts = answered(FEW, params, [SOURCE[:30], SOURCE[:5]], (1, 0), 12)
    assert [source_length(FEW, text) for text in texts] == [31, 6]
    assert all(len(text) == source_length(FEW, text) + 13 for text in texts)
    chosen = calibrated(FEW, params, texts)
    assert isinstance(chosen, T5Config) and chosen.stream_shift > 0
    assert len(chosen.norm_low) == len(FEW.norms) == 2 * 1 + 1 + 3 * 2 + 1
    check_ranges(fold(params, chosen), chosen)
    np.testing.assert_allclose(whole(params, chosen), whole(params, FEW), atol=1e-3)


def test_a_text_without_a_source_is_none() -> None:
    for text in ([0, 5, 6], [5, 6]):
        with pytest.raises(ValueError, match="has a source"):
            source_length(FEW, np.array(text))


def test_blocks_are_not_cut() -> None:
    """But both stacks may have another number of them."""
    assert T5.with_layers(3).norms.count((None, "last norm")) == 1
    assert (T5.with_layers(3).num_layers, T5.with_layers(3).num_decoder_layers) == (3, 3)
    with pytest.raises(ValueError, match="is not cut into blocks"):
        T5.with_blocks([0])


def test_what_both_parties_know_is_the_decoder_s_table_alone() -> None:
    assert list(FAMILY.public) == ["bias"]


@pytest.mark.parametrize("buckets", [0, -4])
def test_a_peer_that_states_no_buckets_is_refused(buckets: int) -> None:
    """Fields of a session's settings come from the other party."""
    with pytest.raises(ValueError, match="must be a positive multiple of 4"):
        config_from({**T5.asdict(), "relative_attention_num_buckets": buckets})


def test_ranges_that_leave_out_first_rows_are_none() -> None:
    with pytest.raises(ValueError, match="public_rows must be 0"):
        replace(T5, public_rows=1)
