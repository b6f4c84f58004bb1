"""The tokenizer of a GGUF file as the files of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.importing.gguf_file import GgufFile
from models.importing.pre_tokenizers import BY_NAME
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

# Types of tokens (`tokenizer.ggml.token_type`).
_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5
# Control tokens that end an answer, whatever else the file names.
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_SPACE = "\u2581"  # what stands for a space in tokens of SentencePiece


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    generation: dict[str, Any]


def tokenizer_of(file: GgufFile) -> TokenizerFiles:
    """Return the tokenizer of a file. InputError, with the field, for what is not supported."""
    fields = _Fields(file)
    tokens, types = _tokens(fields)
    added = [
        {
            "id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": types[i] != _USER,
        }
        for i in range(len(tokens))
        if types[i] in (_UNKNOWN, _CONTROL, _USER)
    ]  # fmt: skip
    kind = fields.text("model")
    if kind == "gpt2":
        parts, begins = _byte_level(fields, tokens)
    elif kind == "llama":
        parts, begins = _sentencepiece(fields, tokens, types)
    else:
        raise fields.fault("model", "is not supported, only gpt2 and llama")
    bos, eos = fields.token("bos", tokens), fields.token("eos", tokens)
    if eos is None:
        raise fields.fault("eos_token_id", "is missing")
    begins = fields.flag("add_bos_token", begins)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **parts,
    }
    if begins and bos is not None:
        content["post_processor"] = _beginning(tokens[bos], bos, parts["post_processor"])
    names = {
        f"{name}_token": tokens[number]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (number := fields.token(key, tokens)) is not None
    }
    template = file.fields.get("tokenizer.chat_template")
    config = {
        **names,
        "add_bos_token": begins and bos is not None,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({"chat_template": template} if isinstance(template, str) else {}),
    }
    ends = [eos, *(fields.token(name, tokens) for name in ("eot", "eom"))]
    ends += [i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _ENDS]
    several = list(dict.fromkeys(i for i in ends if i is not None))
    generation = {"eos_token_id": several if len(several) > 1 else eos}
    if bos is not None:
        generation["bos_token_id"] = bos
    return TokenizerFiles(content, config, generation)


def _tokens(fields: _Fields) -> tuple[list[str], list[int]]:
    """Return the tokens with their types, without those at the end that fill up the embedding."""
    tokens = fields.texts("tokens")
    if not tokens:
        raise fields.fault("tokens", "is empty")
    types = fields.numbers("token_type", len(tokens), np.ones(len(tokens), np.int32))
    count = len(tokens)
    while count > 1 and types[count - 1] == _UNUSED:
        count -= 1
    if len(set(tokens[:count])) != count:
        twice = next(t for i, t in enumerate(tokens) if t in tokens[:i])
        raise fields.fault("tokens", f"has {shown(twice)} twice")
    return tokens[:count], types[:count].tolist()


def _byte_level(fields: _Fields, tokens: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Return the parts of a tokenizer of GPT-2's kind, and whether texts begin with BOS."""
    name = fields.text("pre")
    if name not in BY_NAME:
        raise fields.fault("pre", f"is not supported, only {', '.join(BY_NAME)}")
    pre = BY_NAME[name]
    known, merges = set(tokens), []
    for merge in fields.texts("merges"):
        pair = merge.split(" ")
        if len(pair) != 2 or not {*pair, "".join(pair)} <= known:
            raise fields.fault("merges", f"has {shown(merge)}, which is no pair of tokens")
        merges.append(pair)
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    parts = {
        "normalizer": pre.normalizer,
        "pre_tokenizer": (
            {"type": "Sequence", "pretokenizers": pre.splits}
            if len(pre.splits) > 1
            else pre.splits[0]
        ),
        "post_processor": byte_level | {"trim_offsets": False},
        "decoder": byte_level,
        "model": _bpe(tokens, merges, ignore_merges=pre.whole_words),
    }
    return parts, pre.begins


def _sentencepiece(
    fields: _Fields, tokens: Sequence[str], types: Sequence[int]
) -> tuple[dict[str, Any], bool]:
    """Return the parts of a tokenizer of SentencePiece's kind, as LLaMA has it."""
    raise fields.fault("model", "is not supported")


def _bpe(tokens: Sequence[str], merges: list[list[str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges, **more,
    }  # fmt: skip


def _beginning(token: str, number: int, rest: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what puts a token before every text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }  # fmt: skip
    return {"type": "Sequence", "processors": [rest, template]} if rest else template


class _Fields:
    """Fields that start with `tokenizer.ggml.`."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def _of(self, name: str) -> Any:
        return self._file.fields.get(f"tokenizer.ggml.{name}")

    def text(self, name: str) -> str:
        found = self._of(name)
        if not isinstance(found, str):
            raise self.fault(name, "is missing")
        return found

    def texts(self, name: str) -> list[str]:
        found = self._of(name)
        if not isinstance(found, list):
            raise self.fault(name, "is missing")
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = self._of(name)
        if found is not None and not isinstance(found, bool):
            raise self.fault(name, "is neither true nor false")
        return default if found is None else found

    def numbers(self, name: str, count: int, default: np.ndarray | None = None) -> np.ndarray:
        found = default if self._of(name) is None else self._of(name)
        if not isinstance(found, np.ndarray) or len(found) != count:
            raise self.fault(name, f"has not {count} numbers, one for each token")
        return found

    def token(self, name: str, tokens: Sequence[str]) -> int | None:
        """Return the number of a token with a part to play, None where the file names none."""
        found = self._of(f"{name}_token_id")
        if found is not None and not (type(found) is int and 0 <= found < len(tokens)):
            raise self.fault(f"{name}_token_id", "is the number of no token")
        return found

    def fault(self, name: str, what: str) -> InputError:
        found = self._of(name)
        quoted = f" ({shown(found)})" if isinstance(found, int | float | str) else ""
        return InputError(
            f"{self._file.path}: field tokenizer.ggml.{name}{quoted} {what}; use a file of a "
            "supported model"
        )
