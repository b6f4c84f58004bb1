"""The tokenizer of a model directory, and decoding of a stream of tokens.

Two kinds of BPE: GPT-2's, whose tokens are bytes, and SentencePiece's, as LLaMA has it: a token is
text with a mark for a space, or one byte of a character that no token has. A stream goes on where a
prompt ends, so the space before its first word stays, which the library strips from a text.

Uses the `tokenizers` library directly: importing `transformers` would add seconds to every start.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from models.hf import CONFIG_FILE, read_json
from spu_llm.core.errors import InputError

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    `eos_ids` end a text. `digest` is the SHA-256 (hex) of the content of `tokenizer.json`, whatever
    its formatting: two parties with the same digest give every token the same number.
    """

    eos_ids: frozenset[int]
    vocab_size: int
    digest: str
    _bpe: tokenizers.Tokenizer
    _bytes: tuple[bytes, ...]  # of each token; empty for a special token

    @staticmethod
    def load(directory: Path) -> Tokenizer:
        """The tokenizer in `directory/tokenizer.json`; InputError if it cannot be used."""
        path = Path(directory) / TOKENIZER_FILE
        content = read_json(path, f"put the model's {TOKENIZER_FILE} into this directory")
        decoders = _decoders(path, content)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        try:
            bpe = tokenizers.Tokenizer.from_str(canonical)
        except Exception as error:  # the library raises plain Exception
            reason = " ".join(str(error).split())
            raise InputError(f"{path} is not a valid tokenizer ({reason}); copy it again") from None
        bytes_of: Callable[[str], bytes] = _byte_level
        if decoders != {"ByteLevel"}:
            bytes_of = functools.partial(_sentencepiece, bpe, decoders)
        special = {t["id"] for t in content.get("added_tokens", []) if t.get("special")}
        # Numbers may have gaps, so their count is not the size.
        tokens = {number: token for token, number in bpe.get_vocab().items()}
        size = max(tokens) + 1
        return Tokenizer(
            eos_ids=_eos_ids(path, bpe),
            vocab_size=size,
            digest=hashlib.sha256(canonical.encode()).hexdigest(),
            _bpe=bpe,
            _bytes=tuple(
                b"" if i in special else bytes_of(tokens.get(i, "")) for i in range(size)
            ),
        )

    @property
    def special_tokens(self) -> dict[str, int]:
        """The numbers of special tokens, which have no text, by their names."""
        added = self._bpe.get_added_tokens_decoder().items()
        return {token.content: number for number, token in added if token.special}

    def encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        """Token ids of `text`, with what the tokenizer puts before any text (LLaMA's first token,
        nothing of GPT-2's) unless it `goes_on` after another one; what it may put after one would
        end the text that goes on.
        """
        found = self._bpe.encode(text, add_special_tokens=not goes_on)
        of_text = [i for i, added in enumerate(found.special_tokens_mask) if not added]
        return list(found.ids[: of_text[-1] + 1] if of_text else found.ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens vanish, bytes that are no UTF-8 become U+FFFD."""
        return self.token_bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that `ids` stand for; ids outside the vocabulary stand for none."""
        return b"".join(self._bytes[i] for i in ids if 0 <= i < self.vocab_size)


class StreamDecoder:
    """Decodes tokens as they come, without ever showing part of a character.

    The concatenation of every `push` and the final `finish` equals `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain now; the bytes of an unfinished character wait."""
        return self._utf8.decode(self._tokenizer.token_bytes(ids))

    def finish(self) -> str:
        """What was held back: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)


def _decoders(path: Path, content: Any) -> set[str]:
    """The types of a tokenizer's decoders; InputError if it is of neither kind."""
    parts = content if isinstance(content, dict) else {}
    decoder = parts.get("decoder")
    found = {_type(decoder)}
    if isinstance(decoder, dict) and isinstance(decoder.get("decoders"), list):
        found = set(map(_type, decoder["decoders"]))
    known = found == {"ByteLevel"} or (found & _SPACES and found <= _SENTENCEPIECE)
    if _type(parts.get("model")) != "BPE" or not known:
        raise InputError(
            f"{path} is not a byte-level BPE tokenizer, nor one of SentencePiece's; use that of a "
            "GPT-2 or LLaMA model"
        )
    return found


_SPACES = {"Metaspace", "Replace"}  # decoders that turn marks into spaces
_SENTENCEPIECE = {*_SPACES, "ByteFallback", "Fuse", "Strip"}


def _type(part: Any) -> str:
    if not isinstance(part, dict):
        return ""
    # Files from before the library wrote a type, GPT-2's own among them, have merges alone.
    return str(part.get("type", "BPE" if "merges" in part else ""))


def _eos_ids(path: Path, bpe: tokenizers.Tokenizer) -> frozenset[int]:
    """What ends a text, as `transformers` finds it in the files beside `path`: the first
    `eos_token_id`, a number or several, in generation_config.json or else config.json; or else the
    `eos_token` in tokenizer_config.json. Without any of these, GPT-2's.
    """
    for name in (GENERATION_FILE, CONFIG_FILE):
        stated = _stated(path.with_name(name), "eos_token_id")
        if stated is not None:
            ids = stated if isinstance(stated, list) else [stated]
            if not ids or not all(type(i) is int and bpe.id_to_token(i) is not None for i in ids):
                raise InputError(
                    f"{path.with_name(name)} has eos_token_id {json.dumps(stated)}; it must be the "
                    "number of a token, or a list of such"
                )
            return frozenset(ids)
    token = _stated(path.with_name(TOKENIZER_CONFIG_FILE), "eos_token") or END_OF_TEXT
    text = token.get("content") if isinstance(token, dict) else token
    number = bpe.token_to_id(text) if isinstance(text, str) else None
    if number is None:
        raise InputError(
            f"{path} has no token {text} for the end of a text; give its number as eos_token_id in "
            f"{CONFIG_FILE}"
        )
    return frozenset([number])


def _stated(path: Path, name: str) -> Any:
    """A field of a file that may not be there."""
    content = read_json(path, "") if path.exists() else None
    return content.get(name) if isinstance(content, dict) else None


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted (Radford et al. 2019, `encoder.py`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level(token: str) -> bytes:
    """The bytes of a token of GPT-2's kind; an added one that is not byte-level is plain text."""
    try:
        return bytes(_BYTE_OF_CHARACTER[c] for c in token)
    except KeyError:
        return token.encode()


def _sentencepiece(bpe: tokenizers.Tokenizer, decoders: set[str], token: str) -> bytes:
    """The bytes of a token of SentencePiece's kind, in a text that another token began."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token) if "ByteFallback" in decoders else None
    if byte:
        return bytes.fromhex(byte[1])
    first = "a"
    return str(bpe.decoder.decode([first, token])).removeprefix(first).encode()
