"""The byte-level BPE tokenizer of a model directory, and decoding of a stream of tokens.

Uses the `tokenizers` library directly: importing `transformers` would add seconds to every start.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from spu_llm.core.errors import InputError

TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    `digest` is the SHA-256 (hex) of the content of `tokenizer.json`, whatever its formatting: two
    parties with the same digest give every token the same number.
    """

    eos_id: int
    vocab_size: int
    digest: str
    _bpe: tokenizers.Tokenizer
    _bytes: tuple[bytes, ...]  # of each token; empty for a special token

    @staticmethod
    def load(directory: Path) -> Tokenizer:
        """The tokenizer in `directory/tokenizer.json`; InputError if it cannot be used."""
        path = Path(directory) / TOKENIZER_FILE
        text = _read(path)
        content = _checked(path, text)
        try:
            bpe = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            reason = " ".join(str(error).split())
            raise InputError(f"{path} is not a valid tokenizer ({reason}); copy it again") from None
        eos_id = bpe.token_to_id(END_OF_TEXT)
        if eos_id is None:
            raise InputError(f"{path} has no token {END_OF_TEXT}; use a GPT-2 tokenizer")
        special = {t["id"] for t in content.get("added_tokens", []) if t.get("special")}
        # Numbers may have gaps, so their count is not the size.
        tokens = {number: token for token, number in bpe.get_vocab().items()}
        size = max(tokens) + 1
        return Tokenizer(
            eos_id=eos_id,
            vocab_size=size,
            digest=_digest(content),
            _bpe=bpe,
            _bytes=tuple(
                b"" if i in special else _token_bytes(tokens.get(i, "")) for i in range(size)
            ),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end-of-text token around it."""
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

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


def _read(path: Path) -> str:
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is not a directory; give the path of a model directory")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing; put the model's {TOKENIZER_FILE} into this directory"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text; copy it again") from None


def _checked(path: Path, text: str) -> dict[str, Any]:
    """The JSON object in `text`, if it describes a byte-level BPE."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); copy it again") from None
    parts = content if isinstance(content, dict) else {}
    kinds = [_type(parts.get("model")), _type(parts.get("decoder"))]
    if kinds != ["BPE", "ByteLevel"]:
        raise InputError(f"{path} is not a byte-level BPE tokenizer; use that of a GPT-2 model")
    return parts


def _type(part: Any) -> str:
    if not isinstance(part, dict):
        return ""
    # Files from before the library wrote a type, GPT-2's own among them, have merges alone.
    return str(part.get("type", "BPE" if "merges" in part else ""))


def _digest(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted (Radford et al. 2019, `encoder.py`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def _token_bytes(token: str) -> bytes:
    """The bytes of a vocabulary entry; an added token that is not byte-level is plain text."""
    try:
        return bytes(_BYTE_OF_CHARACTER[c] for c in token)
    except KeyError:
        return token.encode()
