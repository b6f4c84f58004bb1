"""The tokenizer of a model directory, and decoding of a stream of tokens.

Two kinds of BPE are supported: GPT-2's, whose tokens are bytes, and SentencePiece's, as LLaMA has
it: a token is text with a mark for a space, or one byte of a character that no token has. So is
SentencePiece's Unigram, as T5 has it. A stream continues a prompt, so the space before its first
word stays, which the library strips from a text.

Uses the `tokenizers` library directly: importing `transformers` would add seconds to every start.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from models.files import (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    read_json,
)
from models.tokenizer_growth import check_growth
from models.vocabulary import added_tokens, numbered_tokens
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Tokenizer:
    """Conversion of texts to token ids and back. All of a text is encoded: truncation, padding and
    dropout of merges in `tokenizer.json`, which are for training, are ignored.
    """

    eos_ids: frozenset[int]
    vocab_size: int
    digest: str
    _written: str  # digest of the content as it is spelt
    _bpe: tokenizers.Tokenizer
    _bytes: tuple[bytes, ...]  # of each token; empty for a special token

    @staticmethod
    def load(directory: Path) -> Tokenizer:
        """Return the tokenizer in `directory/tokenizer.json`; InputError if it cannot be used."""
        path = Path(directory) / TOKENIZER_FILE
        content = read_json(path, f"put the model's {TOKENIZER_FILE} into this directory")
        return Tokenizer.of(path, content, functools.partial(_eos_ids, path))

    @staticmethod
    def of(
        path: Path, content: Any, eos_ids: Callable[[dict[str, int]], frozenset[int]]
    ) -> Tokenizer:
        """Return the tokenizer with the content of a `tokenizer.json`. InputError, which calls it
        `path`, when it cannot be used. `eos_ids`: maps all tokens to the ids that end a text.
        """
        decoders = _decoders(path, content)
        tokens = numbered_tokens(path, content)
        bpe = _library(path, content, tokens)
        added, meant = added_tokens(path, content), json.loads(bpe.to_str())
        if decoders == ["ByteLevel"]:
            merged = {"".join(pair) for pair in meant["model"]["merges"]}
            bytes_of = functools.partial(
                _byte_level, {token["content"] for token in added} - merged
            )
        else:
            bytes_of = functools.partial(_sentencepiece, bpe, decoders)
        unigram = _type(content["model"]) == "Unigram"
        special = {
            token["content"]
            for token in added
            if token.get("special") and not (unigram and _SENTINEL.fullmatch(token["content"]))
        }
        return Tokenizer(
            eos_ids=eos_ids(tokens),
            vocab_size=len(tokens),
            digest=_digest(meant),
            _written=_digest(content),
            _bpe=bpe,
            _bytes=tuple(
                b"" if token in special else bytes_of(token)
                for token in sorted(tokens, key=tokens.__getitem__)
            ),
        )

    @property
    def special_tokens(self) -> dict[str, int]:
        """Return the ids of special tokens, which have no text, by name."""
        added = self._bpe.get_added_tokens_decoder().items()
        return {
            token.content: number
            for number, token in added
            if token.special and not self._bytes[number]
        }

    def is_named(self, digest: str) -> bool:
        """Tell whether `digest` is a digest of this tokenizer, by its meaning or as spelt; keys
        name their tokenizer by either.
        """
        return digest in (self.digest, self._written)

    def encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        """Return the token ids of `text`, after the tokens that the tokenizer puts before any text
        (LLaMA's first token; none for GPT-2), unless the text `goes_on` after another one. Tokens
        that it puts after a text are left out: they would end a text that continues. InputError
        when it has no tokens for the text.
        """
        with _library_errors("the tokenizer cannot read the text (%s)"):
            encoding = self._bpe.encode(text, add_special_tokens=not goes_on)
        of_text = [i for i, added in enumerate(encoding.special_tokens_mask) if not added]
        return list(encoding.ids[: of_text[-1] + 1] if of_text else encoding.ids)

    @property
    def prepends(self) -> bool:
        """Return whether the tokenizer puts a space before the first word of a text."""
        decoder = self._bpe.decoder
        return not isinstance(decoder, tokenizers.decoders.ByteLevel) and (
            decoder.decode(["\u2581a"]) == "a"
        )

    @property
    def beginning(self) -> list[int]:
        """Return the tokens that the tokenizer puts before any text."""
        return [i for i, _ in itertools.takewhile(lambda one: one[1], self._around())]

    @property
    def ending(self) -> list[int]:
        """Return the tokens that the tokenizer puts after a text that ends (T5's last token)."""
        after = itertools.takewhile(lambda one: one[1], reversed(self._around()))
        return [i for i, _ in after][::-1]

    def _around(self) -> list[tuple[int, int]]:
        """Return the tokens of a text, and which of them the tokenizer adds."""
        encoding = self._bpe.encode("a")
        return [*zip(encoding.ids, encoding.special_tokens_mask, strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special tokens vanish, invalid UTF-8 becomes U+FFFD."""
        return self.token_bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes that `ids` stand for; ids outside the vocabulary stand for none."""
        return b"".join(self._bytes[i] for i in ids if 0 <= i < self.vocab_size)


class StreamDecoder:
    """Decodes tokens as they come, without ever showing part of a character.

    The concatenation of every `push` and the final `finish` equals `Tokenizer.decode` of all ids;
    of a text that `begins`, rather than going on after another one, without the space that the
    tokenizer puts before its first word.
    """

    def __init__(self, tokenizer: Tokenizer, *, begins: bool = False) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = begins and tokenizer.prepends

    def push(self, ids: Iterable[int]) -> str:
        """Return the further text that `ids` complete; bytes of an unfinished character wait."""
        text = self._utf8.decode(self._tokenizer.token_bytes(ids))
        if text and self._strips:
            self._strips = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """Return the text of the waiting bytes: U+FFFD for an unfinished character, or nothing."""
        return self._utf8.decode(b"", final=True)


def _library(path: Path, content: dict[str, Any], tokens: dict[str, int]) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of this content. InputError when the content cannot be used,
    or the library numbers its tokens differently from `tokens`.
    """
    if not _is_whole(content.get("post_processor")):
        raise InputError(f"{path} adds tokens to a text that it does not have; copy it again")
    check_growth(path, content)
    with _library_errors(f"{path} is not a valid tokenizer (%s); copy it again"):
        bpe = tokenizers.Tokenizer.from_str(json.dumps(content))
        bpe.no_truncation()
        bpe.no_padding()
        if isinstance(bpe.model, tokenizers.models.BPE):
            bpe.model.dropout = None
        numbers = bpe.get_vocab()
        around = bpe.encode("a").ids
    if numbers != tokens:
        name = min(numbers.items() ^ tokens.items())[0]
        raise InputError(
            f"{path} gives the added token {shown(name)} a number that does not follow on; copy it "
            "again"
        )
    if any(number >= len(tokens) for number in around):
        raise InputError(f"{path} adds tokens to a text that it does not have; copy it again")
    return bpe


def _is_whole(processor: Any) -> bool:
    """Tell whether every template in a post-processor defines the special tokens that it adds: the
    library does not check this before it encodes a text.
    """
    if not isinstance(processor, dict):
        return True
    if isinstance(several := processor.get("processors"), list):
        return all(map(_is_whole, several))
    pieces = [*_listed(processor.get("single")), *_listed(processor.get("pair"))]
    special = [piece["SpecialToken"] for piece in pieces if "SpecialToken" in piece]
    known = processor.get("special_tokens")
    return all(
        isinstance(known, dict) and isinstance(one, dict) and one.get("id") in [*known]
        for one in special
    )


def _listed(pieces: Any) -> list[Any]:
    return [piece for piece in pieces if isinstance(piece, dict)] if type(pieces) is list else []


def _digest(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


@contextlib.contextmanager
def _library_errors(words: str) -> Iterator[None]:
    """Raise InputError when the library fails; %s in `words` becomes the library's message. The
    library raises plain Exception, and where its Rust code panics (on an expression that takes too
    long) a PanicException, which is not an Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(str(error).split())
    else:
        return
    raise InputError(words.replace("%s", said))


def _decoders(path: Path, content: Any) -> list[str]:
    """Return the types of a tokenizer's decoders, in order. InputError for a tokenizer of neither
    supported kind.
    """
    parts = content if isinstance(content, dict) else {}
    decoder = parts.get("decoder")
    each: Any = [decoder]
    if isinstance(decoder, dict) and _type(decoder) == "Sequence":
        each = decoder.get("decoders")
    types = list(map(_type, each)) if isinstance(each, list) else []
    known = types == ["ByteLevel"] or (
        types == [kind for kind in _SENTENCEPIECE if kind in types]
        and _SPACES & set(types)
        and all(map(_is_plain, each))
    )
    kind = _type(parts.get("model"))
    if kind not in ("BPE", "Unigram") or not known or (kind, types) == ("Unigram", ["ByteLevel"]):
        raise InputError(
            f"{path} is not a byte-level BPE tokenizer, nor one of SentencePiece's; use that of a "
            "GPT-2, LLaMA or T5 model"
        )
    return types


# T5's tokens for spans of a text that is not there: what it writes names them.
_SENTINEL = re.compile(r"<extra_id_[0-9]{1,3}>")
_SPACES = {"Metaspace", "Replace"}  # decoders that turn marks into spaces
# In the order in which they decode token by token.
_SENTENCEPIECE = ("Replace", "ByteFallback", "Metaspace", "Fuse", "Strip")


def _is_plain(decoder: Any) -> bool:
    """Tell whether a SentencePiece decoder keeps all of a text but its first space."""
    kind = _type(decoder)
    if kind == "Replace":
        pattern = decoder.get("pattern")
        mark = pattern.get("String") if isinstance(pattern, dict) else None
        return isinstance(mark, str) and len(mark) == 1
    return kind != "Strip" or (decoder.get("content"), decoder.get("stop")) == (" ", 0)


def _type(part: Any) -> str:
    if not isinstance(part, dict):
        return ""
    # Files from before the library wrote a type, GPT-2's own among them, have merges alone.
    return str(part.get("type", "BPE" if "merges" in part else ""))


def _eos_ids(path: Path, tokens: dict[str, int]) -> frozenset[int]:
    """Return the ids of the tokens that end a text, by the rules of `transformers` from the files
    beside `path`: `eos_token_id`, one number or several, in generation_config.json or else in
    config.json; or else the `eos_token` in tokenizer_config.json; or else GPT-2's.
    """
    for name in (GENERATION_FILE, CONFIG_FILE):
        stated = _stated(path.with_name(name), "eos_token_id")
        if stated is not None:
            return checked_eos_ids(path.with_name(name), stated, len(tokens))
    token = _stated(path.with_name(TOKENIZER_CONFIG_FILE), "eos_token") or END_OF_TEXT
    text = token.get("content") if isinstance(token, dict) else token
    number = tokens.get(text) if isinstance(text, str) else None
    if number is None:
        raise InputError(
            f"{path} has no token {text if text == END_OF_TEXT else shown(text)} for the end of a "
            f"text; give its number as eos_token_id in {CONFIG_FILE}"
        )
    return frozenset([number])


def checked_eos_ids(path: Path, stated: Any, tokens: int) -> frozenset[int]:
    """Return the ids in `stated`, an eos_token_id from `path`. InputError unless it is a number
    below `tokens`, or a list of such numbers.
    """
    ids = stated if isinstance(stated, list) else [stated]
    if not ids or not all(type(i) is int and 0 <= i < tokens for i in ids):
        raise InputError(
            f"{path} has eos_token_id {shown(stated)}; it must be the number of a token, or a list "
            "of such"
        )
    return frozenset(ids)


def _stated(path: Path, name: str) -> Any:
    """Return a field of a JSON file, None where the file or the field is missing."""
    content = read_json(path, "") if path.exists() else None
    return content.get(name) if isinstance(content, dict) else None


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each printable character stands for in GPT-2's tokens (Radford et al.
    2019, `encoder.py`).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level(literal: set[str], token: str) -> bytes:
    """Return the bytes of a token of a byte-level tokenizer. A token in `literal` is an added one
    that no merge makes: it stands for its own characters, even for accented ones, which elsewhere
    stand for bytes.
    """
    if token in literal and len(token) > 1:
        return token.encode()
    try:
        return bytes(_BYTE_OF_CHARACTER[c] for c in token)
    except KeyError:
        return token.encode()


def _sentencepiece(bpe: tokenizers.Tokenizer, decoders: list[str], token: str) -> bytes:
    """Return the bytes of a SentencePiece tokenizer's token that is not the first of its text."""
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token) if "ByteFallback" in decoders else None
    if byte:
        return bytes.fromhex(byte[1])
    first = "a"
    return str(bpe.decoder.decode([first, token])).removeprefix(first).encode()
