"""Weights in several files: read like those in one, imported into one, and refused when files and
index do not belong together.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from models.family import Params
from models.files import INDEX_FILE, TOKENIZER_CONFIG_FILE, WEIGHTS_FILE, files_of
from models.hf import load_model, save_model
from models.importing import directory as importing
from models.importing.run import import_model
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from tests.kit.models import LLAMA, save_tokenizer, tiny_params
from tests.models.checkpoints import assert_same

PARAMS = tiny_params(LLAMA, 2)
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def split(path: Path, dtype: Any) -> None:
    """Put the weights of a directory into three files, as transformers does."""
    tensors = load_file(path / WEIGHTS_FILE)
    places = {name: SHARDS[i % 3] for i, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        held = {name: tensors[name].astype(dtype) for name in tensors if places[name] == shard}
        save_file(held, path / shard)
    (path / WEIGHTS_FILE).unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (path / INDEX_FILE).write_text(json.dumps(index))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = tmp_path / "sharded"
    save_model(path, LLAMA, PARAMS, dtype=np.float32)
    save_tokenizer(path)
    split(path, jnp.bfloat16)
    return path


def rounded(dtype: Any) -> Params:
    return jax.tree.map(lambda w: np.asarray(jnp.asarray(w, dtype), np.float32), PARAMS)


def refused(act: Callable[[], Any], *words: str) -> None:
    with pytest.raises(InputError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def change_index(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((path / INDEX_FILE).read_text())
    change(index)
    (path / INDEX_FILE).write_text(json.dumps(index))


def test_several_files_are_read_like_one(sharded: Path) -> None:
    config, params = load_model(sharded)
    assert config == LLAMA
    assert_same(params, rounded(jnp.bfloat16))
    assert {file.name for file in files_of(sharded)} >= {*SHARDS, INDEX_FILE, "config.json"}


@pytest.mark.parametrize("piece", [1, 100, 1 << 24])
def test_a_directory_is_imported_as_it_is_stored(
    sharded: Path, tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "_PIECE", piece)
    import_model(sharded, tmp_path / "out")
    assert_same(load_model(tmp_path / "out")[1], rounded(jnp.bfloat16))
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        WEIGHTS_FILE,
        "tokenizer.json",
        TOKENIZER_CONFIG_FILE,
    }
    with safe_open(tmp_path / "out" / WEIGHTS_FILE, framework="numpy") as stored:
        assert {stored.get_slice(name).get_dtype() for name in stored.keys()} == {"BF16"}
    assert Tokenizer.load(tmp_path / "out").digest == Tokenizer.load(sharded).digest


def test_what_a_model_has_no_use_for_stays_behind(sharded: Path, tmp_path: Path) -> None:
    tensors = load_file(sharded / SHARDS[0])
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    save_file(tensors, sharded / SHARDS[0])
    (sharded / "chat_template.jinja").write_text("{{ messages }}")
    import_model(sharded, tmp_path / "out")
    assert len(load_file(tmp_path / "out" / WEIGHTS_FILE)) == 12
    described = json.loads((tmp_path / "out" / TOKENIZER_CONFIG_FILE).read_text())
    assert described == {"chat_template": "{{ messages }}"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i: i.pop("weight_map"), ["has no weight_map"]),
        (lambda i: i.update(weight_map=[]), ["has no weight_map"]),
        (lambda i: i["weight_map"].update(a="../x.safetensors"), ['puts "a" into', "no name of"]),
        (lambda i: i["weight_map"].update(a=".x.safetensors"), ['puts "a" into', "no name of"]),
        (lambda i: i["weight_map"].update(a="x.bin"), ['puts "a" into "x.bin"']),
        (lambda i: i["weight_map"].update(a=3), ['puts "a" into 3']),
        (lambda i: i["weight_map"].update(a="y.safetensors"), ["y.safetensors is missing"]),
        (lambda i: i["weight_map"].update(a=SHARDS[1]), ['puts "a" into', "which lacks it"]),
        (lambda i: i["weight_map"].pop("model.norm.weight"), ["no tensor model.norm.weight"]),
        (
            lambda i: i["weight_map"].update({f"{n}": f"{n}.safetensors" for n in range(1001)}),
            ["more than 1000 files"],
        ),
    ],
)
def test_an_index_of_other_weights_is_refused(
    sharded: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: list[str]
) -> None:
    change_index(sharded, change)
    refused(lambda: load_model(sharded), str(sharded), *words)
    refused(lambda: import_model(sharded, tmp_path / "out"), str(sharded), *words)
    assert [file.name for file in tmp_path.iterdir()] == ["sharded"]


def test_a_shard_that_is_damaged_is_named(sharded: Path, tmp_path: Path) -> None:
    whole = (sharded / SHARDS[1]).read_bytes()
    (sharded / SHARDS[1]).write_bytes(whole[:-1])
    refused(lambda: load_model(sharded), SHARDS[1], "truncated or not a safetensors file")
    (sharded / SHARDS[1]).unlink()
    refused(lambda: import_model(sharded, tmp_path / "out"), SHARDS[1], "is missing")


def test_a_link_out_of_a_model_is_refused(sharded: Path, tmp_path: Path) -> None:
    (sharded / SHARDS[0]).rename(tmp_path / "elsewhere")
    (sharded / SHARDS[0]).symlink_to(tmp_path / "elsewhere")
    refused(lambda: load_model(sharded), SHARDS[0], "leads out")
    refused(lambda: files_of(sharded), SHARDS[0], "leads out")


def test_no_numbers_and_other_shapes_are_refused(sharded: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    shard = json.loads((sharded / INDEX_FILE).read_text())["weight_map"][name]
    tensors = load_file(sharded / shard)
    good = tensors[name]
    tensors[name] = np.array(good)
    tensors[name][3, 2] = np.inf
    save_file(tensors, sharded / shard)
    refused(lambda: import_model(sharded, tmp_path / "out"), shard, "NaN or infinite", name)
    tensors[name] = good[:-1]
    save_file(tensors, sharded / shard)
    refused(lambda: import_model(sharded, tmp_path / "out"), shard, "of shape [23, 16]", name)


def test_a_model_without_weights_or_tokenizer(sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded, tmp_path / "bare")
    (tmp_path / "bare" / INDEX_FILE).unlink()
    refused(lambda: import_model(tmp_path / "bare", tmp_path / "out"), "safetensors is missing")
    (sharded / "tokenizer.json").unlink()
    refused(lambda: import_model(sharded, tmp_path / "out"), "tokenizer.json is missing")
