"""Import of a GGUF file's model: its `config.json`, and its tensors under Hugging Face names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from models.importing.gguf_file import GgufFile
from models.importing.gguf_values import stored, values
from models.importing.safetensors_file import Stored
from models.rope import Rope
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

_TORCH_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EMBEDDING, _HEAD, _ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"


class _Tensor(NamedTuple):
    """A tensor of a model in the Hugging Face layout."""

    name: str
    sides: str


_OUTSIDE = {
    _EMBEDDING: _Tensor("model.embed_tokens.weight", "vd"),
    "output_norm.weight": _Tensor("model.norm.weight", "d"),
    _HEAD: _Tensor("lm_head.weight", "vd"),
}
_IN_BLOCKS = {
    "attn_norm.weight": _Tensor("input_layernorm.weight", "d"),
    "attn_q.weight": _Tensor("self_attn.q_proj.weight", "qd"),
    "attn_k.weight": _Tensor("self_attn.k_proj.weight", "kd"),
    "attn_v.weight": _Tensor("self_attn.v_proj.weight", "kd"),
    "attn_output.weight": _Tensor("self_attn.o_proj.weight", "dq"),
    "ffn_norm.weight": _Tensor("post_attention_layernorm.weight", "d"),
    "ffn_gate.weight": _Tensor("mlp.gate_proj.weight", "id"),
    "ffn_up.weight": _Tensor("mlp.up_proj.weight", "id"),
    "ffn_down.weight": _Tensor("mlp.down_proj.weight", "di"),
}
_BIASES = {
    "attn_q.bias": _Tensor("self_attn.q_proj.bias", "q"),
    "attn_k.bias": _Tensor("self_attn.k_proj.bias", "k"),
    "attn_v.bias": _Tensor("self_attn.v_proj.bias", "k"),
}


def _sides(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the dimensions of tensors by letter: vocabulary, residual stream, queries, keys (or
    values), and the inner width of the feed-forward layer.
    """
    return {
        "v": config["vocab_size"],
        "d": config["hidden_size"],
        "q": config["num_attention_heads"] * config["head_dim"],
        "k": config["num_key_value_heads"] * config["head_dim"],
        "i": config["intermediate_size"],
    }


class _Architecture(NamedTuple):
    """An architecture of GGUF files, and the Hugging Face model that it corresponds to."""

    model_type: str
    class_name: str
    turned: bool
    biases: bool


# Mistral's models are "llama", too.
_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", turned=True, biases=False),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", turned=False, biases=True),
}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the `config.json` of a file's model. InputError for an unsupported model."""
    reader = _Fields(file)
    kind = _architecture(file)
    if type(parts := file.fields.get("split.count", 1)) is not int or parts > 1:
        raise InputError(
            f"{file.path} is one of several files of a model; put them together with llama.cpp's "
            "llama-gguf-split --merge"
        )
    heads = reader.size("attention.head_count")
    width = reader.size("embedding_length")
    if (head_dim := reader.size("attention.key_length", width // heads)) != reader.size(
        "attention.value_length", head_dim
    ):
        raise reader.fault("attention.value_length", "differs from attention.key_length")
    if reader.size("rope.dimension_count", head_dim) != head_dim:
        raise reader.fault("rope.dimension_count", "turns a part of a head only")
    if reader.size("expert_count", 0):
        raise reader.fault("expert_count", "is of a mixture of experts")
    context = reader.size("context_length")
    if 0 < reader.size("attention.sliding_window", 0) < context:
        raise reader.fault("attention.sliding_window", "is below the context")
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(f"{file.path} has no matrix {_EMBEDDING}; copy it again")
    turned = _rope(reader, head_dim)
    return {
        "architectures": [kind.class_name],
        "model_type": kind.model_type,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": context,
        "hidden_size": width,
        "intermediate_size": reader.size("feed_forward_length"),
        "num_hidden_layers": reader.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": turned.theta,
        "rope_scaling": turned.describe(),
        "tie_word_embeddings": _HEAD not in file.tensors,
        "hidden_act": "silu",
        "torch_dtype": _TORCH_TYPES[stored(file, embedding, "").dtype],
    }


def tensors_of(file: GgufFile, config: Mapping[str, Any]) -> list[Stored]:
    """Return the tensors of the model with this `config.json`. InputError when a tensor is missing,
    has another shape, or belongs to no such model.
    """
    kind, head_dim, sides = _architecture(file), config["head_dim"], _sides(config)
    names = dict(_OUTSIDE)
    if config["tie_word_embeddings"]:
        del names[_HEAD]
    for i in range(config["num_hidden_layers"]):
        for name, tensor in (_IN_BLOCKS | (_BIASES if kind.biases else {})).items():
            names[f"blk.{i}.{name}"] = tensor._replace(name=f"model.layers.{i}.{tensor.name}")
    for name in file.tensors:
        if name not in names and name != _ROPE:
            raise InputError(
                f"{file.path} has the tensor {shown(name)}, which no {kind.model_type} model that "
                "works here has; use a file of a supported model"
            )
    renamed = []
    for name, tensor in names.items():
        place = file.tensors.get(name)
        if place is None:
            raise InputError(f"{file.path} has no tensor {name}; copy it again")
        shape = tuple(sides[side] for side in tensor.sides)
        if place.shape != shape:
            raise InputError(
                f"{file.path} has tensor {name} of shape {list(place.shape)}, expected "
                f"{list(shape)} from its fields; copy it again"
            )
        if kind.turned and name.endswith(("attn_q.weight", "attn_k.weight")):
            renamed.append(stored(file, place, tensor.name, _halves(head_dim), head_dim))
        else:
            renamed.append(stored(file, place, tensor.name))
    return renamed


def _architecture(file: GgufFile) -> _Architecture:
    name = file.fields.get("general.architecture")
    if not isinstance(name, str):
        raise InputError(f"{file.path} names no general.architecture; give a model's file")
    if (kind := _ARCHITECTURES.get(name)) is None:
        raise InputError(
            f"{file.path} is of the architecture {shown(name)}; only "
            f"{' and '.join(_ARCHITECTURES)} are supported"
        )
    return kind


def _halves(head_dim: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that reorders the rows of heads from llama.cpp's layout to Hugging Face's.
    The two rows that a position turns together are neighbours in the former; in the latter, they
    stand at the same place of a head's two halves.
    """

    def order(rows: np.ndarray) -> np.ndarray:
        n, width = rows.shape
        pairs = rows.reshape(n // head_dim, head_dim // 2, 2, width)
        return pairs.swapaxes(1, 2).reshape(n, width)

    return order


def _rope(reader: _Fields, head_dim: int) -> Rope:
    """Return how positions turn queries and keys. InputError for an unsupported way."""
    plain = Rope(reader.number("rope.freq_base", 10000.0))
    kind = reader.text("rope.scaling.type", "none")
    if kind == "linear":
        plain = plain._replace(kind="linear", factor=reader.number("rope.scaling.factor"))
    elif kind != "none":
        raise reader.fault("rope.scaling.type", "is not supported, only linear")
    elif reader.number("rope.scale_linear", 1.0) != 1:  # what older files call it
        plain = plain._replace(kind="linear", factor=reader.number("rope.scale_linear"))
    place = reader.file.tensors.get(_ROPE)
    if place is None:
        return plain
    if place.shape != (head_dim // 2,):
        raise InputError(
            f"{reader.file.path} has tensor {_ROPE} of shape {list(place.shape)}, expected "
            f"{[head_dim // 2]} from its fields; copy it again"
        )
    # LLaMA 3.1 and 3.2 differ in the factor alone.
    divisors = values(reader.file, place)
    scaled = Rope(plain.theta, "llama3", float(divisors.max()))
    if plain.kind != "default" or not _divides(scaled, divisors):
        raise InputError(
            f"{reader.file.path}: tensor {_ROPE} scales rotary positions in another way than LLaMA "
            "3.1 and 3.2 do, which is not supported; use a file of a supported model"
        )
    return scaled


def _divides(rope: Rope, divisors: np.ndarray) -> bool:
    """Tell whether `rope` has the frequencies [head_dim / 2] of plain positions, divided by
    `divisors`.
    """
    try:
        rope.check()
    except ValueError:
        return False
    size = 2 * len(divisors)
    factors = Rope(rope.theta).frequencies(size) / rope.frequencies(size)
    return np.allclose(divisors, factors, rtol=1e-4)


class _Fields:
    """Reader of the fields of a file whose names begin with its architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.prefix = file, file.fields.get("general.architecture")

    def size(self, name: str, default: int | None = None) -> int:
        """Return a size; InputError when the field has none."""
        value = self._of(name, default)
        if type(value) is not int or not 0 <= value <= 1 << 30 or (default != 0 and not value):
            raise self.fault(name, "is no size")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a text; InputError when the field has none."""
        value = self._of(name, default)
        if not isinstance(value, str):
            raise self.fault(name, "is no text")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number with the shortest decimals that give its float32; InputError when the
        field has none.
        """
        value = self._of(name, default)
        if type(value) is not float or not math.isfinite(value):
            raise self.fault(name, "is no number")
        return float(str(np.float32(value)))

    def fault(self, name: str, what: str) -> InputError:
        given = self.file.fields.get(f"{self.prefix}.{name}")
        value = given if isinstance(given, int | float | str) else type(given).__name__
        return InputError(
            f"{self.file.path}: field {shown(f'{self.prefix}.{name}')} ({shown(value)}) {what}; "
            "use a file of a supported model"
        )

    def _of(self, name: str, default: Any) -> Any:
        value = self.file.fields.get(f"{self.prefix}.{name}", default)
        if value is None:
            raise InputError(
                f"{self.file.path} has no field {self.prefix}.{name}; use a file with a whole model"
            )
        return value
