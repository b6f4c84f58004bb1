"""Tokenizers from anybody that would make much of a text, or never end with one."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from models.importing.pre_tokenizers import BY_NAME
from models.tokenizer import Tokenizer
from models.tokenizer_growth import check_growth
from spu_llm.core.errors import InputError
from tests.kit.models import save_tokenizer

PATH = Path("it")


def replace(written: dict[str, str], by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": written, "content": by}


def several(*parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [*parts]}


def around(pieces: list[Any], ids: list[int]) -> dict[str, Any]:
    special = {"<s>": {"id": "<s>", "ids": ids, "tokens": []}}
    return {"type": "TemplateProcessing", "single": pieces, "special_tokens": special}


def table(*texts: bytes) -> dict[str, Any]:
    written = (4).to_bytes(4, "little") + b"trie" + b"\0".join(texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(written).decode()}


BYTES = {"type": "ByteLevel"}
TEXT, BEGIN = {"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "<s>"}}


@pytest.mark.parametrize(
    "content",
    [
        {"normalizer": several(*[replace({"String": "a"}, "a" * 40)] * 2)},
        {"normalizer": several(several(replace({"Regex": ""}, "a" * 1000)))},
        {"normalizer": replace({"String": ""}, "a" * 1000)},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
        {"normalizer": table(b"a", b"b" * 1001)},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 5}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split"}] * 33}},
        {"post_processor": around([TEXT] * 65, [0])},
        {"post_processor": around([BEGIN, TEXT], [0] * 65)},
        {"post_processor": {"type": "Sequence", "processors": [around([TEXT] * 32, [0])] * 2}},
    ],
)
def test_what_makes_texts_long_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="it makes texts more than 1000 times longer"):
        check_growth(PATH, content)


@pytest.mark.parametrize(
    "content",
    [
        {
            "normalizer": several(
                {"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")
            ),
            "post_processor": around([BEGIN, TEXT], [1]),
        },
        {
            "normalizer": several(table(b"a", b"b" * 33), replace({"Regex": " {2,}"}, "▁")),
            "pre_tokenizer": {"type": "Metaspace"},
        },
        *(
            {
                "normalizer": known.normalizer,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": known.splits},
            }
            for known in BY_NAME.values()
        ),
    ],
)
def test_what_published_models_do_is_not(content: dict[str, Any]) -> None:
    check_growth(PATH, content)


def test_an_expression_that_takes_too_long_is_one_line(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    path.write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(InputError, match="the tokenizer cannot read the text .*retry-limit"):
        tokenizer.encode("a" * 40 + "b")
