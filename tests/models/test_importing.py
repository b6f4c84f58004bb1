"""GGUF files: what comes out is the model that went in, whatever its types; and nothing is left of
a file that is damaged or of another model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from models.family import Params
from models.hf import load_config, load_model
from models.importing import gguf_values
from models.importing.run import import_model
from models.llama import LlamaConfig
from models.qwen2 import Qwen2Config
from spu_llm.core.errors import InputError
from tests.kit.models import VOCAB, save_tokenizer, tiny_params
from tests.models.checkpoints import assert_same
from tests.models.gguf_files import Raw, byte_level, tensors, write_gguf

CONFIG = LlamaConfig(
    VOCAB,
    max_position_embeddings=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=5e4,
)
TIED = replace(CONFIG, tie_word_embeddings=True)
# All matrices have rows of whole blocks.
WIDE = replace(CONFIG, hidden_size=64, head_dim=16)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    save_tokenizer(folder)
    return folder


def imported(tmp_path: Path) -> Path:
    import_model(tmp_path / "model.gguf", tmp_path / "out")
    return tmp_path / "out"


def fault(tmp_path: Path) -> str:
    """Return the one line of a file that is refused, which leaves nothing behind."""
    before = set(tmp_path.iterdir())
    with pytest.raises(InputError) as caught:
        imported(tmp_path)
    message = str(caught.value)
    assert "\n" not in message and str(tmp_path / "model.gguf") in message
    assert set(tmp_path.iterdir()) == before
    return message


def random_params(config: LlamaConfig) -> Params:
    """Parameters in which every gain differs from 1."""
    params = tiny_params(config, 3)
    key = jax.random.key(1)
    return jax.tree.map(
        lambda w: np.asarray(w + 0.1 * jax.random.normal(key, w.shape), np.float32), params
    )


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_the_model_that_went_in_comes_out(
    tmp_path: Path, tokenizer: Path, config: LlamaConfig
) -> None:
    params = random_params(config)
    write_gguf(tmp_path / "model.gguf", config, tensors(config, params), tokenizer)
    loaded, back = load_model(imported(tmp_path))
    assert loaded == config
    assert_same(back, params)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_values_of_quantised_weights_are_those_of_the_library(
    tmp_path: Path, tokenizer: Path, name: str
) -> None:
    kind = GGMLQuantizationType[name]
    params = random_params(WIDE)
    write_gguf(tmp_path / "model.gguf", WIDE, tensors(WIDE, params), tokenizer, kind=kind)
    _, back = load_model(imported(tmp_path))

    def kept(w: np.ndarray) -> np.ndarray:
        values = dequantize(quantize(np.ascontiguousarray(w), kind), kind)
        return values if name == "BF16" else values.astype(np.float16).astype(np.float32)

    assert_same(back["embed"], kept(params["embed"]))
    assert_same(back["blocks"][1]["down"], kept(params["blocks"][1]["down"].T).T)
    assert_same(back["blocks"][0]["q"], kept(params["blocks"][0]["q"].T).T)
    assert_same(back["norm"], params["norm"])


# Where the scales of a block are, of which random bytes would be no numbers.
@pytest.mark.parametrize(
    ("name", "scales"),
    [("Q2_K", [80, 82]), ("Q3_K", [108]), ("Q4_K", [0, 2]), ("Q5_K", [0, 2]), ("Q6_K", [208])],
)
def test_values_of_k_quants_are_those_of_the_library(
    tmp_path: Path, tokenizer: Path, name: str, scales: list[int], monkeypatch: Any
) -> None:
    monkeypatch.setattr(gguf_values, "_PIECE", 1000)  # three rows at a time
    config, kind = replace(CONFIG, intermediate_size=256), GGMLQuantizationType[name]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(0).integers(256, size=(config.hidden_size, size), dtype=np.uint8)
    for at in scales:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    named: dict[str, Any] = dict(tensors(config, random_params(config)))
    named["blk.1.ffn_down.weight"] = Raw(kind, blocks)
    write_gguf(tmp_path / "model.gguf", config, named, tokenizer)
    _, back = load_model(imported(tmp_path))
    wanted = dequantize(blocks, kind)
    assert len(np.unique(wanted)) > 50
    np.testing.assert_array_equal(back["blocks"][1]["down"].T, wanted.astype(np.float16))


def test_rows_of_heads_are_put_in_order_piece_by_piece(
    tmp_path: Path, tokenizer: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(gguf_values, "_PIECE", 1)
    params = random_params(CONFIG)
    write_gguf(tmp_path / "model.gguf", CONFIG, tensors(CONFIG, params), tokenizer)
    assert_same(load_model(imported(tmp_path))[1], params)


def test_a_model_with_biases(tmp_path: Path, tokenizer: Path) -> None:
    shape = {name: getattr(CONFIG, name) for name in Qwen2Config.size_names()}
    config = Qwen2Config(**shape, rms_norm_eps=1e-5)
    params = random_params(config)
    write_gguf(tmp_path / "model.gguf", config, tensors(config, params), tokenizer)
    loaded, back = load_model(imported(tmp_path))
    assert loaded == config
    assert_same(back, params)


@pytest.mark.parametrize(
    "fields",
    [{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}],
)
def test_linear_positions(tmp_path: Path, tokenizer: Path, fields: dict[str, Any]) -> None:
    named = tensors(CONFIG, random_params(CONFIG))
    write_gguf(tmp_path / "model.gguf", CONFIG, named, tokenizer, **fields)
    assert load_config(imported(tmp_path)) == replace(CONFIG, rope_kind="linear", rope_factor=4.0)


def llama3_divisors(size: int, theta: float, factor: float) -> np.ndarray:
    """Return `LlamaModel.generate_extra_tensors` of llama.cpp's converter."""
    collected = []
    for i in range(0, size, 2):
        wavelength = 2 * math.pi * theta ** (i / size)
        if wavelength < 8192 / 4.0:
            collected.append(1.0)
        elif wavelength > 8192 / 1.0:
            collected.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            collected.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(collected, np.float32)


def test_llama3_positions_are_told_from_their_divisors(tmp_path: Path, tokenizer: Path) -> None:
    named = tensors(CONFIG, random_params(CONFIG))
    divisors = llama3_divisors(CONFIG.head_dim, CONFIG.rope_theta, 32.0)
    assert 1 < sorted(divisors)[-2] < 32 or len(set(divisors)) > 2
    write_gguf(tmp_path / "model.gguf", CONFIG, named | {"rope_freqs.weight": divisors}, tokenizer)
    loaded = load_config(imported(tmp_path))
    assert loaded == replace(CONFIG, rope_kind="llama3", rope_factor=32.0)


@pytest.mark.parametrize("change", [lambda d: 2 * d, lambda d: d[::-1], lambda d: 0 * d])
def test_other_divisors_of_frequencies_are_refused(
    tmp_path: Path, tokenizer: Path, change: Any
) -> None:
    named = tensors(CONFIG, random_params(CONFIG))
    divisors = change(llama3_divisors(CONFIG.head_dim, CONFIG.rope_theta, 8.0))
    write_gguf(tmp_path / "model.gguf", CONFIG, named | {"rope_freqs.weight": divisors}, tokenizer)
    assert "tensor rope_freqs.weight scales rotary positions in another way" in fault(tmp_path)


def test_an_existing_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="is there already"):
        imported(tmp_path)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"block_count": None}, "has no field llama.block_count"),
        ({"block_count": 0}, 'field "llama.block_count" (0) is no size'),
        ({"block_count": 3}, "has no tensor blk.2.attn_norm.weight"),
        ({"block_count": 1}, 'the tensor "blk.1.'),
        ({"block_count": 2000}, "config.json describes no model"),
        ({"attention.head_count": 3}, "config.json describes no model"),
        ({"attention.head_count": 8}, "blk.0.attn_q.weight of shape [64, 32], expected [128, 32]"),
        ({"attention.value_length": 8}, "attention.value_length"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "rms_norm_eps"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "is no number"),
        ({"rope.freq_base": "10"}, "rope.freq_base"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"rope.scaling.type": [1, 2]}, "rope.scaling.type"),
        ({"rope.scaling.type": "linear"}, "has no field llama.rope.scaling.factor"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.1}, "must be 1 to 1e6"),
        ({"expert_count": 8}, "expert_count"),
        ({"attention.sliding_window": 32}, "attention.sliding_window"),
    ],
)
def test_another_model_is_refused(
    tmp_path: Path, tokenizer: Path, fields: dict[str, Any], expected: str
) -> None:
    named = tensors(CONFIG, random_params(CONFIG))
    write_gguf(tmp_path / "model.gguf", CONFIG, named, tokenizer, **fields)
    assert expected in fault(tmp_path)


def test_a_file_in_parts_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    named, parts = tensors(CONFIG, random_params(CONFIG)), {"split.count": 2}
    write_gguf(tmp_path / "model.gguf", CONFIG, named, byte_level(tokenizer, "gpt-2") | parts)
    assert "is one of several files of a model" in fault(tmp_path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert 'architecture "mamba"; only' in fault(tmp_path)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    named = tensors(CONFIG, random_params(CONFIG))
    named["blk.1.ffn_up.weight"][3, 5] = np.nan
    write_gguf(tmp_path / "model.gguf", CONFIG, named, tokenizer)
    assert 'NaN or infinite values in tensor "blk.1.ffn_up.weight"' in fault(tmp_path)


def test_truncated_anywhere(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, CONFIG, tensors(CONFIG, random_params(CONFIG)), tokenizer)
    whole = path.read_bytes()
    for size in (0, 3, 4, 10, 30, 200, 3000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        actual = fault(tmp_path)
        assert "truncated" in actual or "no GGUF file" in actual or "end of the file" in actual


def test_no_file(tmp_path: Path) -> None:
    assert "No such file" in fault(tmp_path)
