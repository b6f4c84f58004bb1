"""Tiny GGUF files of models made here, written by the library of the format's authors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    """The tensors as llama.cpp's converter names and orders them."""
    found = {
        "token_embd.weight": params["embed"],
        "output_norm.weight": params["norm"],
    }
    if "head" in params:
        found["output.weight"] = params["head"].T
    for i, block in enumerate(params["blocks"]):
        found |= {
            f"blk.{i}.attn_norm.weight": block["ln_1"],
            f"blk.{i}.attn_q.weight": turned(block["q"].T, config.num_attention_heads),
            f"blk.{i}.attn_k.weight": turned(block["k"].T, config.num_key_value_heads),
            f"blk.{i}.attn_v.weight": block["v"].T,
            f"blk.{i}.attn_output.weight": block["o"].T,
            f"blk.{i}.ffn_norm.weight": block["ln_2"],
            f"blk.{i}.ffn_gate.weight": block["gate"].T,
            f"blk.{i}.ffn_up.weight": block["up"].T,
            f"blk.{i}.ffn_down.weight": block["down"].T,
        }
    return {name: np.ascontiguousarray(values) for name, values in found.items()}


def write_gguf(
    path: Path,
    config: LlamaConfig,
    named: dict[str, np.ndarray],
    tokenizer: Path,
    *,
    pre: str = "gpt-2",
    kind: GGMLQuantizationType = F32,
    **fields: Any,
) -> None:
    """Write a model with the byte-level tokenizer of a directory; matrices as `kind`. `fields` of
    the architecture stand beside or for those of the configuration, None leaves one out.
    """
    arch = "llama"
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
    for name, value in (own | fields).items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{name}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{name}", value)
    add_byte_level(writer, tokenizer, pre)
    for name, values in named.items():
        if values.ndim == 2 and kind != F32:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_byte_level(writer: gguf.GGUFWriter, directory: Path, pre: str) -> None:
    """Add the tokenizer of a directory as llama.cpp's converter does."""
    content = json.loads((directory / TOKENIZER_FILE).read_text())
    added = {token["id"]: token for token in content["added_tokens"]}
    vocab = content["model"]["vocab"] | {t["content"]: t["id"] for t in added.values()}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [
        TokenType.NORMAL if i not in added
        else TokenType.CONTROL if added[i]["special"]
        else TokenType.USER_DEFINED
        for i in range(len(tokens))
    ]  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
