"""How text is written, as one document: what a model's files say, and what is refused of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import text_format
from models.chat import Template
from models.text_format import TextFormat
from models.tokenizer import END_OF_TEXT, Tokenizer
from spu_llm.core.errors import InputError
from tests.kit.models import save_tokenizer

TEXT = "def read(path):\n    return path"
Content = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(directory)
    return directory


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a model's directory, to write more into."""
    save_tokenizer(tmp_path)
    return tmp_path


def content_of(actual: TextFormat) -> Content:
    content: Content = json.loads(actual.document)
    return content


def of_content(content: Any) -> TextFormat:
    return TextFormat.parse(json.dumps(content).encode())


def test_a_document_says_what_the_files_do(own: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": END_OF_TEXT,
        "pad_token": None,
        "chat_template": "{{ messages }}",
        "model_max_length": 3,
    }
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    (own / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    written, files = TextFormat.of_model(own), Tokenizer.load(own)
    for actual in (written, TextFormat.parse(written.document)):
        assert actual.tokenizer.digest == files.digest
        assert actual.tokenizer.eos_ids == {3, 7}
        assert actual.tokenizer.encode(TEXT) == files.encode(TEXT)
        assert actual.tokenizer.decode(actual.tokenizer.encode(TEXT)) == TEXT
        assert actual.template == Template("{{ messages }}", "<s>", END_OF_TEXT)
        assert actual.digest == written.digest


def test_the_digest_is_of_all_that_is_said(own: Path) -> None:
    before = TextFormat.of_model(own)
    assert before.template is None
    (own / "generation_config.json").write_text('{"eos_token_id": 5}')
    after = TextFormat.of_model(own)
    assert after.tokenizer.digest == before.tokenizer.digest
    assert after.digest != before.digest
    assert TextFormat.of_model(own).digest == after.digest


def test_it_loads_from_a_file_and_from_a_directory(model: Path, tmp_path: Path) -> None:
    actual = TextFormat.of_model(model)
    path = tmp_path / "document.json"
    path.write_bytes(actual.document)
    assert TextFormat.load(path).digest == TextFormat.load(model).digest == actual.digest
    with pytest.raises(InputError, match="gone.json cannot be read"):
        TextFormat.load(tmp_path / "gone.json")


def _set(name: str, value: Any) -> Callable[[Content], None]:
    return lambda content: content.__setitem__(name, value)


def _template(**parts: Any) -> Content:
    return {"source": "", "bos_token": "", "eos_token": ""} | parts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.pop("eos_token_id"), "other fields than"),
        (_set("more", 1), "other fields than"),
        (_set("tokenizer", []), "its tokenizer is not a byte-level BPE"),
        (_set("eos_token_id", []), "eos_token_id \\[\\]"),
        (_set("eos_token_id", [288]), "eos_token_id \\[288\\]"),
        (_set("eos_token_id", [True]), "eos_token_id \\[true\\]"),
        (_set("chat_template", "a"), "chat_template without"),
        (_set("chat_template", {"source": "a"}), "chat_template without"),
        (_set("chat_template", _template(source=3)), "source is no text"),
        (_set("chat_template", _template(source="\udfff")), "source is no text"),
        (_set("chat_template", _template(bos_token="\ud800")), "bos_token is no text"),
        (_set("chat_template", _template(source="a" * (1 + (1 << 20)))), "1048576 characters"),
        (lambda content: content["tokenizer"]["model"]["vocab"].pop("a"), "none with number"),
    ],
)
def test_what_a_document_may_not_say(
    model: Path, change: Callable[[Content], None], words: str
) -> None:
    content = content_of(TextFormat.of_model(model))
    change(content)
    with pytest.raises(InputError, match=words) as error:
        of_content(content)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (b"", "not valid JSON"),
        (b"\xff{}", "not valid JSON"),
        (b"[]", "other fields than"),
        (b'{"tokenizer":1,"tokenizer":1}', "is there twice"),
        (b"[" * 40 + b"]" * 40, "more than 32 levels"),
        (b"[" * 100_000, "levels|not valid JSON"),
    ],
)
def test_what_is_no_document(document: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        TextFormat.parse(document)


def test_a_document_has_a_size(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = TextFormat.of_model(model).document
    monkeypatch.setattr(text_format, "DOCUMENT_BYTES", len(document))
    TextFormat.parse(document)
    with pytest.raises(InputError, match="more than 0 MB"):
        TextFormat.parse(document + b" ")
    (model / "tokenizer_config.json").write_text('{"chat_template": "a"}')
    with pytest.raises(InputError, match="more than 0 MB of tokenizer"):
        TextFormat.of_model(model)
    (model / "tokenizer_config.json").unlink()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(value=_JSON, at=st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_a_document_with_any_value_anywhere_is_taken_or_refused(
    model: Path, value: Any, at: list[int]
) -> None:
    """What is taken gives every text tokens that it has, or refuses the text."""
    content = content_of(TextFormat.of_model(model))
    node: Any = content
    for step in at[:-1]:
        parts = list(node) if isinstance(node, dict) else range(len(node or ()))
        inner = node[parts[step % len(parts)]] if len(parts) else None
        if not isinstance(inner, dict | list) or not inner:
            break
        node = inner
    keys = list(node) if isinstance(node, dict) else range(len(node))
    node[keys[at[-1] % len(keys)]] = value
    try:
        actual = of_content(content).tokenizer
        ids = actual.encode("def a(b): \u00e9\U0001f600")
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert all(0 <= i < actual.vocab_size for i in ids)
        assert isinstance(actual.decode(ids), str)
