"""Tokenizers out of GGUF files: the same ids as the library's own, of the model's kind, on 1 MB of
code, prose, numbers, scripts, emoji and white space.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.convert_slow_tokenizer import generate_merges

from models.files import GENERATION_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from models.importing.run import import_model
from models.llama import LlamaConfig
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from tests.kit.models import tiny_params
from tests.kit.paths import ROOT
from tests.models.gguf_files import byte_level, tensors, write_gguf

BEGIN, END, CALL = "<|im_start|>", "<|im_end|>", "<tool_call>"
SPACE = "\u2581"


def _mixed(rng: random.Random) -> Iterator[str]:
    """Text without end: pieces of this repository's files, and what they lack."""
    files = [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "models").glob("*.py"))]
    texts = [file.read_text(encoding="utf-8") for file in files]
    scripts = [
        "äöüßéñçøÅ",
        "абвгдежзийкл",
        "αβγδεζηθ",
        "这是一个秘密的问题吗",
        "ひらがなカタカナ",
        "हिन्दीभाषा",
        "العربية",
        "한국어",
        "e\u0301a\u0308n\u0303",
        "ǅǈᾈʰˀ",
        "²³½Ⅷ٣४",
    ]
    signs = "😀👍🏽👩\u200d👩\u200d👧\u200d👦🇫🇷\u200b\u00a0\ufeff\u2028"
    signs += "—…“”«»$€+=<>^~|`\x00\x7f\U0010ffff"
    while True:
        text = rng.choice(texts)
        start = rng.randrange(len(text))
        yield text[start : start + rng.randrange(400)]
        script = rng.choice(scripts)
        yield " ".join("".join(rng.choices(script, k=rng.randrange(1, 9))) for _ in range(9))
        yield "".join(rng.choices(signs, k=5))
        yield str(rng.randrange(10 ** rng.randrange(1, 20)))
        yield "".join(rng.choices(" \t\n\r\x0b", weights=(9, 2, 3, 1, 1), k=rng.randrange(12)))
        yield rng.choice(["I'll", "we'Ve", " 'S", "don't", "It's", "3rd", "x=1", BEGIN, END, CALL])


def mixed(size: int, seed: int) -> list[str]:
    """Draw so many characters in a few texts."""
    parts, count = [], 0
    for part in _mixed(random.Random(seed)):
        parts.append(part)
        count += len(part)
        if count > size:
            text = "".join(parts)
            return [text[i : i + size // 20] for i in range(0, size, size // 20)]
    raise AssertionError


TEXTS = mixed(1_000_000, 1)
assert sum(len(text.encode()) for text in TEXTS) > 1_000_000

_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


# As the models' own files have them.
_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _WORDS])
KINDS: dict[str, tuple[Any, bool]] = {
    "gpt-2": (_WORDS, False),
    "smollm": (_DIGITS, False),
    "llama-bpe": (_by(_GPT4), True),
    "qwen2": (_by(_GPT4.replace("{1,3}", "")), False),
    "tekken": (_by(_TEKKEN), True),
}


def trained(name: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a kind, with merges of its own; no text has a token before
    it.
    """
    pre, whole = KINDS[name]
    bpe = tokenizers.Tokenizer(models.BPE(ignore_merges=whole))
    bpe.pre_tokenizer, bpe.decoder = pre, decoders.ByteLevel()
    if name == "qwen2":
        bpe.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[END, BEGIN],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator(mixed(60_000, 2), trainer)
    bpe.add_tokens([AddedToken(CALL, normalized=False)])
    return bpe


def model_of(tmp_path: Path, fields: dict[str, Any]) -> Path:
    """Import a file with this tokenizer."""
    config = LlamaConfig(len(fields["tokens"]), 64, 8, 8, 1, 2, 2, tie_word_embeddings=True)
    named = tensors(config, tiny_params(config, 1))
    write_gguf(tmp_path / "model.gguf", config, named, fields)
    import_model(tmp_path / "model.gguf", tmp_path / "out")
    return tmp_path / "out"


def same_ids(actual: Tokenizer, wanted: tokenizers.Tokenizer) -> None:
    for text, ids in zip(TEXTS, wanted.encode_batch_fast(TEXTS), strict=True):
        assert actual.encode(text) == ids.ids


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("gpt-2", "tekken") else name
        for name in KINDS
    ],
)
def test_ids_of_byte_level_tokenizers(tmp_path: Path, name: str) -> None:
    wanted = trained(name)
    wanted.save(str(tmp_path / TOKENIZER_FILE))
    fields = byte_level(tmp_path, name) | {"add_bos_token": False}
    tokenizer = Tokenizer.load(model_of(tmp_path, fields))
    same_ids(tokenizer, wanted)
    if name != "qwen2":  # which composes characters
        text = TEXTS[0].replace(BEGIN, "").replace(END, "")
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "stated", "begins"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("smollm", True, True),
    ],
)
def test_what_a_text_begins_with(
    tmp_path: Path, name: str, stated: bool | None, begins: bool
) -> None:
    wanted = trained(name)
    wanted.save(str(tmp_path / TOKENIZER_FILE))
    fields = byte_level(tmp_path, name) | {"bos_token_id": 1, "add_bos_token": stated}
    tokenizer = Tokenizer.load(model_of(tmp_path, fields))
    ids = wanted.encode("def read").ids
    assert tokenizer.encode("def read") == ([1, *ids] if begins else ids)
    assert tokenizer.encode("def read", goes_on=True) == ids


@pytest.fixture(scope="module")
def pieces() -> dict[str, Any]:
    """Fields of a tokenizer of SentencePiece's kind."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=1200, show_progress=False, limit_alphabet=300)
    texts = [text.replace(CALL, "") for text in mixed(60_000, 2)]
    bpe.train_from_iterator(texts, trainer)
    vocab = bpe.get_vocab()
    learned = sorted(vocab, key=vocab.__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(learned)
    tokens += [CALL, "[PAD0]", "[PAD1]"]
    kinds += [TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNUSED]
    # Scores of merges fall; single characters are below.
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [-float(i) for i in range(len(tokens))],
        "token_type": [int(kind) for kind in kinds],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def sentencepiece(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the library's, as the converter of transformers makes it of a LLaMA's."""
    tokens = fields["tokens"][:-2]
    vocab = {token: i for i, token in enumerate(tokens)}
    scored = list(zip(tokens, fields["scores"], strict=False))
    bpe = tokenizers.Tokenizer(
        models.BPE(
            vocab,
            generate_merges(vocab, scored),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    bpe.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    bpe.add_special_tokens([AddedToken(t, normalized=False) for t in tokens[:3]])
    bpe.add_tokens([AddedToken(CALL, normalized=False)])
    return bpe


def test_ids_of_sentencepiece(tmp_path: Path, pieces: dict[str, Any]) -> None:
    out = model_of(tmp_path, pieces)
    tokenizer = Tokenizer.load(out)
    assert tokenizer.vocab_size == len(pieces["tokens"]) - 2  # what fills up is left out
    same_ids(tokenizer, sentencepiece(pieces))
    assert tokenizer.encode("a")[0] == 1 and tokenizer.eos_ids == {2}
    text = TEXTS[0].replace(CALL, "")
    assert tokenizer.decode(tokenizer.encode(text, goes_on=True)) == " " + text


def test_no_space_before_a_text(tmp_path: Path, pieces: dict[str, Any]) -> None:
    out = model_of(tmp_path, pieces | {"add_space_prefix": False, "add_bos_token": False})
    tokenizer = Tokenizer.load(out)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_what_ends_a_text_and_the_template_come_along(tmp_path: Path) -> None:
    trained("smollm").save(str(tmp_path / TOKENIZER_FILE))
    fields = byte_level(tmp_path, "smollm") | {
        "eos_token_id": 5,
        "eot_token_id": 7,
        "tokenizer.chat_template": "{{ messages }}",
    }
    out = model_of(tmp_path, fields)
    tokens = fields["tokens"]
    assert json.loads((out / GENERATION_FILE).read_text()) == {
        "eos_token_id": [5, 7, tokens.index(END)],
        "bos_token_id": 0,
    }
    described = json.loads((out / TOKENIZER_CONFIG_FILE).read_text())
    assert described["chat_template"] == "{{ messages }}"
    assert described["eos_token"] == tokens[5] and described["bos_token"] == END
    assert Tokenizer.load(out).eos_ids == {5, 7, tokens.index(END)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "t5"}, 'tokenizer.ggml.model ("t5") is not supported'),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokens": ["a"]}, "tokenizer.ggml.token_type has not 1 numbers"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"scores": None}, "tokenizer.ggml.scores has not"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores has not"),
        ({"unknown_token_id": None}, "tokenizer.ggml.unknown_token_id is missing"),
        ({"eos_token_id": None}, "tokenizer.ggml.eos_token_id is missing"),
        ({"eos_token_id": 100000}, "tokenizer.ggml.eos_token_id (100000) is the number of no"),
        ({"bos_token_id": "<s>"}, 'tokenizer.ggml.bos_token_id ("<s>") is the number of no token'),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token (1) is neither true nor false"),
        ({"remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces"),
        ({"model": "gpt2"}, "tokenizer.ggml.pre is missing"),
        ({"model": "gpt2", "pre": "dbrx"}, 'tokenizer.ggml.pre ("dbrx") is not supported'),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a b c"]}, "which is no pair of tokens"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["e zzz"]}, '"e zzz", which is no pair'),
    ],
)
def test_a_tokenizer_that_is_not_supported(
    tmp_path: Path, pieces: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    rows = len(pieces["tokens"])
    config = LlamaConfig(rows, 64, 8, 8, 1, 2, 2, tie_word_embeddings=True)
    named = tensors(config, tiny_params(config, 1))
    write_gguf(tmp_path / "model.gguf", config, named, pieces | changes)
    with pytest.raises(InputError) as caught:
        import_model(tmp_path / "model.gguf", tmp_path / "out")
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_token_twice(tmp_path: Path, pieces: dict[str, Any]) -> None:
    tokens = list(pieces["tokens"])
    tokens[300] = tokens[301]
    with pytest.raises(InputError, match="tokenizer.ggml.tokens has .* twice"):
        model_of(tmp_path, pieces | {"tokens": tokens})
