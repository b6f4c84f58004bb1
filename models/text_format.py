"""Text format of a model: its tokenizer, the tokens that end a text, and its chat template, in one
document that a provider gives its clients, so that they need no file of the model.

    {"tokenizer": what tokenizer.json holds,
     "eos_token_id": [numbers of tokens],
     "chat_template": null, or {"source": "...", "bos_token": "<s>", "eos_token": "</s>"},
     "after_prompt": [numbers of tokens]}

The last field is there for a model whose prompt an encoder reads: the tokens that end what it
reads, and the one from which the text goes on.

The document is UTF-8 JSON of at most `DOCUMENT_BYTES`, and its SHA-256 names it. A client parses it
as it parses any untrusted file: sizes, depth, duplicate names, numbers of tokens, and what the
tokenizer adds around a text are checked before anything is used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from models.chat import MOST_CHARACTERS, Template
from models.config_fields import has_encoder, start_token
from models.files import CONFIG_FILE, TOKENIZER_FILE, parsed, read_json
from models.tokenizer import Tokenizer, checked_eos_ids
from spu_llm.core.errors import InputError

DOCUMENT_BYTES = 64 << 20  # a tokenizer of 256,000 tokens takes 35 MB
_FIELDS = {"tokenizer", "eos_token_id", "chat_template"}
_AFTER_PROMPT = "after_prompt"
_MOST_AFTER = 16  # tokens
_OF_TEMPLATE = {"source", "bos_token", "eos_token"}


@dataclass(frozen=True)
class TextFormat:
    """A model's tokenizer and chat template, with the document that defines them. `after_prompt`:
    the tokens between a prompt and the text, where an encoder reads the prompt; none elsewhere.
    """

    tokenizer: Tokenizer
    template: Template | None
    digest: str
    document: bytes = field(repr=False)
    after_prompt: tuple[int, ...] = ()

    @staticmethod
    def of_model(directory: Path) -> TextFormat:
        """Return the text format of a directory's model. InputError when a file cannot be used."""
        directory = Path(directory)
        tokenizer, template = Tokenizer.load(directory), Template.of_model(directory)
        content = {
            "tokenizer": read_json(directory / TOKENIZER_FILE, ""),
            "eos_token_id": sorted(tokenizer.eos_ids),
            "chat_template": None if template is None else asdict(template),
        }
        if after := _after_prompt(directory, tokenizer):
            content[_AFTER_PROMPT] = after
        try:
            document = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        except UnicodeEncodeError:
            raise InputError(f"{directory} has half a character in its tokenizer's files") from None
        if len(document) > DOCUMENT_BYTES:
            raise InputError(f"{directory} has more than {DOCUMENT_BYTES >> 20} MB of tokenizer")
        return TextFormat(tokenizer, template, _digest(document), document, tuple(after))

    @staticmethod
    def parse(document: bytes) -> TextFormat:
        """Return the text format in a document. InputError when it is invalid or cannot be used."""
        path = Path("the text format")
        if len(document) > DOCUMENT_BYTES:
            raise InputError(f"{path} has more than {DOCUMENT_BYTES >> 20} MB")
        content = parsed(path, document)
        if not isinstance(content, dict) or set(content) - {_AFTER_PROMPT} != _FIELDS:
            raise InputError(f"{path} has other fields than {', '.join(sorted(_FIELDS))}")
        stated = content["eos_token_id"]
        tokenizer = Tokenizer.of(
            Path("its tokenizer"),
            content["tokenizer"],
            lambda tokens: checked_eos_ids(path, stated, len(tokens)),
        )
        template = _template(path, content["chat_template"])
        after = content.get(_AFTER_PROMPT, [])
        if (
            not isinstance(after, list)
            or len(after) > _MOST_AFTER
            or not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in after)
        ):
            raise InputError(f"{path} has an {_AFTER_PROMPT} that is no list of few tokens")
        return TextFormat(tokenizer, template, _digest(document), document, tuple(after))

    @staticmethod
    def load(path: Path) -> TextFormat:
        """Return the text format of a model directory, or of the document in a file. InputError
        when it cannot be used.
        """
        if path.is_dir():
            return TextFormat.of_model(path)
        try:
            return TextFormat.parse(path.read_bytes())
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _after_prompt(directory: Path, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens between a prompt and the text of a directory's model. InputError when the
    text begins with a token that the tokenizer lacks.
    """
    path = directory / CONFIG_FILE
    raw = read_json(path, "") if path.exists() else {}
    if not isinstance(raw, dict) or not has_encoder(raw):
        return []
    try:
        start = start_token(raw)
    except InputError as error:
        raise InputError(f"{path} {error}") from None
    if start >= tokenizer.vocab_size:
        raise InputError(f"{path} has a decoder_start_token_id that is no token; copy it again")
    return [*tokenizer.ending, start]


def _digest(document: bytes) -> str:
    return hashlib.sha256(document).hexdigest()


def _template(path: Path, stated: Any) -> Template | None:
    """Return the chat template, if any. InputError unless each part is a text of at most
    MOST_CHARACTERS.
    """
    if stated is None:
        return None
    if not isinstance(stated, dict) or set(stated) != _OF_TEMPLATE:
        raise InputError(f"{path} has a chat_template without {', '.join(sorted(_OF_TEMPLATE))}")
    for name, text in stated.items():
        if not _is_text(text):
            raise InputError(
                f"{path} has a chat_template whose {name} is no text of {MOST_CHARACTERS} "
                "characters at most"
            )
    return Template(**stated)


def _is_text(value: Any) -> bool:
    """Tell whether `value` is a text of at most MOST_CHARACTERS without half characters
    (surrogates), which JSON can spell.
    """
    if not isinstance(value, str) or len(value) > MOST_CHARACTERS:
        return False
    return not any("\ud800" <= c <= "\udfff" for c in value)
