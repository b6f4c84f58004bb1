"""Import of a GGUF file's tokenizer, as the files of a Hugging Face directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.importing.gguf_file import GgufFile
from models.importing.pre_tokenizers import BY_NAME
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

# Types of tokens (`tokenizer.ggml.token_type`).
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = 1, 2, 3, 4, 5
# Control tokens that end an answer, whatever else the file names.
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_MOST_TOKENS = 1_000_000
_LONGEST_TOKEN = 1024  # characters
_SPACE = "\u2581"  # what stands for a space in tokens of SentencePiece


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    generation: dict[str, Any]


def tokenizer_of(file: GgufFile) -> TokenizerFiles:
    """Return the tokenizer of a file. InputError, which names the field, for an unsupported one."""
    fields = _Fields(file)
    tokens, types = _tokens(fields)
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[i] != _USER,
        }
        for i in range(len(tokens))
        if types[i] in (_UNKNOWN, _CONTROL, _USER)
    ]
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
    """Return the tokens with their types, without the unused last ones, which pad the embedding."""
    tokens = fields.texts("tokens")
    if not 0 < len(tokens) <= _MOST_TOKENS:
        raise fields.fault("tokens", f"has {len(tokens)} tokens")
    types = fields.numbers("token_type", len(tokens), np.ones(len(tokens), np.int32))
    count = len(tokens)
    while count > 1 and types[count - 1] == _UNUSED:
        count -= 1
    twice = next((t for t, count_of in Counter(tokens[:count]).items() if count_of > 1), None)
    if twice is not None:
        raise fields.fault("tokens", f"has {shown(twice)} twice")
    return tokens[:count], types[:count].tolist()


def _byte_level(fields: _Fields, tokens: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Return the parts of a byte-level tokenizer, as GPT-2 has it, and whether texts begin with
    BOS.
    """
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
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
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
    """Return the parts of a SentencePiece tokenizer, as LLaMA has it, and True: texts begin with
    BOS.
    """
    unknown = fields.token("unknown", tokens)
    if unknown is None:
        raise fields.fault("unknown_token_id", "is missing")
    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if fields.has(name):
            raise fields.fault(name, "changes texts in a way that is not supported")
    scores = fields.numbers("scores", len(fields.texts("tokens")))[: len(tokens)].tolist()
    normal = {t: i for i, t in enumerate(tokens) if types[i] == _NORMAL}
    starts = fields.flag("add_space_prefix", True)
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefixed = [{"type": "Prepend", "prepend": _SPACE}, to_space]
    from_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders: list[dict[str, Any]] = [from_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if starts:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": prefixed if starts else [to_space]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens,
            _merges(fields, normal, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }
    return parts, True


def _merges(fields: _Fields, normal: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Return all pairs of tokens that concatenate to a token, the best score first, in the order of
    `generate_merges` of transformers.
    """
    merges = []
    for token, number in normal.items():
        if len(token) > _LONGEST_TOKEN:
            raise fields.fault("tokens", f"has one of {len(token)} characters")
        pairs = (
            (token[:i], token[i:])
            for i in range(1, len(token))
            if token[:i] in normal and token[i:] in normal
        )
        ordered = sorted(pairs, key=lambda pair: (normal[pair[0]], normal[pair[1]]))
        merges += [(scores[number], left, right) for left, right in ordered]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in merges]


def _bpe(tokens: Sequence[str], merges: list[list[str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
        **more,
    }


def _beginning(token: str, number: int, rest: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a post-processor that runs `rest`, if given, and puts a token before every text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": token, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
    return {"type": "Sequence", "processors": [rest, template]} if rest else template


class _Fields:
    """Reader of the fields whose names begin with `tokenizer.ggml.`."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def _of(self, name: str) -> Any:
        return self._file.fields.get(f"tokenizer.ggml.{name}")

    def has(self, name: str) -> bool:
        """Tell whether a field is there and is not false."""
        value = self._of(name)
        return value is not None and value is not False

    def text(self, name: str) -> str:
        value = self._of(name)
        if not isinstance(value, str):
            raise self.fault(name, "is missing")
        return value

    def texts(self, name: str) -> list[str]:
        value = self._of(name)
        if not isinstance(value, list):
            raise self.fault(name, "is missing")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._of(name)
        if value is not None and not isinstance(value, bool):
            raise self.fault(name, "is neither true nor false")
        return default if value is None else value

    def numbers(self, name: str, count: int, default: np.ndarray | None = None) -> np.ndarray:
        value = default if self._of(name) is None else self._of(name)
        if not isinstance(value, np.ndarray) or len(value) != count or not np.isfinite(value).all():
            raise self.fault(name, f"has not {count} numbers, one for each token")
        return value

    def token(self, name: str, tokens: Sequence[str]) -> int | None:
        """Return the id of the token with the role `name` ("bos", "eos" ...), None where the file
        names none.
        """
        value = self._of(f"{name}_token_id")
        if value is not None and not (type(value) is int and 0 <= value < len(tokens)):
            raise self.fault(f"{name}_token_id", "is the number of no token")
        return value

    def fault(self, name: str, what: str) -> InputError:
        value = self._of(name)
        quoted = f" ({shown(value)})" if isinstance(value, int | float | str) else ""
        return InputError(
            f"{self._file.path}: field tokenizer.ggml.{name}{quoted} {what}; use a file of a "
            "supported model"
        )
