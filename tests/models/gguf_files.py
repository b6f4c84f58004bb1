"""Tiny GGUF files of models made here, written by the library of the format's authors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from gguf.quants import quantize

from models.family import Params
from models.files import TOKENIZER_FILE
from models.llama import LlamaConfig

F32 = GGMLQuantizationType.F32


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in llama.cpp's order: `LlamaModel.permute` of its converter."""
    shape = rows.shape
    halves = rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return halves.swapaxes(1, 2).reshape(shape)


def tensors(config: LlamaConfig, params: Params) -> dict[str, np.ndarray]:
    """Return the tensors as llama.cpp's converter names and orders them."""
    pairs = turned if config.family == "llama" else lambda rows, heads: rows
    collected = {"token_embd.weight": params["embed"], "output_norm.weight": params["norm"]}
    if "head" in params:
        collected["output.weight"] = params["head"].T
    for i, block in enumerate(params["blocks"]):
        collected |= {
            f"blk.{i}.attn_norm.weight": block["ln_1"],
            f"blk.{i}.attn_q.weight": pairs(block["q"].T, config.num_attention_heads),
            f"blk.{i}.attn_k.weight": pairs(block["k"].T, config.num_key_value_heads),
            f"blk.{i}.attn_v.weight": block["v"].T,
            f"blk.{i}.attn_output.weight": block["o"].T,
            f"blk.{i}.ffn_norm.weight": block["ln_2"],
            f"blk.{i}.ffn_gate.weight": block["gate"].T,
            f"blk.{i}.ffn_up.weight": block["up"].T,
            f"blk.{i}.ffn_down.weight": block["down"].T,
        }
        for name in "qkv":
            if f"{name}_bias" in block:
                collected[f"blk.{i}.attn_{name}.bias"] = block[f"{name}_bias"]
    return {name: np.ascontiguousarray(values) for name, values in collected.items()}


class Raw(NamedTuple):
    """A tensor's bytes [rows, bytes of a row] of a quantised type."""

    kind: GGMLQuantizationType
    data: np.ndarray


def write_gguf(
    path: Path,
    config: LlamaConfig,
    named: Mapping[str, np.ndarray | Raw],
    tokenizer: Path | Mapping[str, Any],
    *,
    pre: str = "gpt-2",
    kind: GGMLQuantizationType = F32,
    **fields: Any,
) -> None:
    """Write a model with the byte-level tokenizer of a directory, or these fields of one; matrices
    as `kind`. `fields` of the architecture stand beside or for those of the configuration, None
    leaves one out.
    """
    arch = config.family
    writer = gguf.GGUFWriter(path, arch)
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    of_tokenizer = byte_level(tokenizer, pre) if isinstance(tokenizer, Path) else tokenizer
    for name, value in (own | fields).items():
        _add(writer, f"{arch}.{name}", value)
    for name, value in of_tokenizer.items():
        _add(writer, name if "." in name else f"tokenizer.ggml.{name}", value)
    for name, values in named.items():
        if isinstance(values, Raw):
            writer.add_tensor(name, values.data, raw_dtype=values.kind)
        elif values.ndim == 2 and kind != F32:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    kinds = {
        str: writer.add_string,
        float: writer.add_float32,
        bool: writer.add_bool,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    if value is not None:
        kinds[type(value)](name, value)  # type: ignore[operator]


def byte_level(directory: Path, pre: str) -> dict[str, Any]:
    """Return the tokenizer of a directory in the fields that llama.cpp's converter writes."""
    content = json.loads((directory / TOKENIZER_FILE).read_text())
    added = {token["id"]: token for token in content["added_tokens"]}
    vocab = content["model"]["vocab"] | {t["content"]: t["id"] for t in added.values()}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [
        TokenType.NORMAL
        if i not in added
        else TokenType.CONTROL
        if added[i]["special"]
        else TokenType.USER_DEFINED
        for i in range(len(tokens))
    ]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [int(kind) for kind in kinds],
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
