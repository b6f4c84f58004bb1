"""The tokenizer and its stream decoder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, processors

from models.tokenizer import END_OF_TEXT, StreamDecoder, Tokenizer
from spu_llm.api.texts import encoded
from spu_llm.core.errors import InputError
from tests.kit.paths import SHIPPED
from tests.models.tokenizers_of import sentencepiece

TOKENIZER = Tokenizer.load(SHIPPED / "private")
LIBRARY = tokenizers.Tokenizer.from_file(str(SHIPPED / "private" / "tokenizer.json"))
EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True)
# Lone surrogates are no text that a terminal or a file can hold.
TEXT = st.text(st.characters(codec="utf-8"))
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)


def stream(
    ids: list[int], chunks: Sequence[int], tokenizer: Tokenizer = TOKENIZER
) -> tuple[list[str], str]:
    """Return what pushes of the given sizes return, the rest in one, and what `finish` returns."""
    decoder, pushes, at = StreamDecoder(tokenizer), [], 0
    for size in [*chunks, len(ids)]:
        pushes.append(decoder.push(ids[at : at + size]))
        at += size
    return pushes, decoder.finish()


@EXAMPLES
@given(TEXT, st.lists(st.integers(0, 3)))
def test_a_stream_of_text_equals_decoding_at_once(text: str, chunks: list[int]) -> None:
    pushes, rest = stream(TOKENIZER.encode(text), chunks)
    plain = text.replace(END_OF_TEXT, "")
    assert "".join(pushes) == TOKENIZER.decode(TOKENIZER.encode(text)) == plain
    assert rest == ""


@EXAMPLES
@given(IDS, st.lists(st.integers(0, 3)))
def test_a_stream_of_any_ids_equals_decoding_at_once(ids: list[int], chunks: list[int]) -> None:
    pushes, rest = stream(ids, chunks)
    assert "".join(pushes) + rest == TOKENIZER.decode(ids)


@EXAMPLES
@given(IDS)
def test_decoding_equals_the_library(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("character", ["é", "→", "漢", "🙂"])
def test_an_unfinished_character_is_held_back(character: str) -> None:
    ids = LIBRARY.encode(character).ids
    parts = [i for b in character.encode() for i in [_id_of_byte(b)]]
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(parts) == character
    pushes, rest = stream(parts, [1] * len(parts))
    assert pushes == [""] * (len(parts) - 1) + [character, ""] and rest == ""
    assert stream(parts[:-1], []) == ([""], "\ufffd")


def _id_of_byte(byte: int) -> int:
    return next(
        i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes([i]) == bytes([byte])
    )


def test_special_and_unknown_ids_decode_to_nothing() -> None:
    (end,) = TOKENIZER.eos_ids
    assert TOKENIZER.encode(END_OF_TEXT) == [end]
    assert TOKENIZER.decode([end, TOKENIZER.vocab_size, -1]) == ""


def test_digest_depends_on_content_alone(tmp_path: Path) -> None:
    content = json.loads((SHIPPED / "private" / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=3, sort_keys=True))
    assert Tokenizer.load(tmp_path).digest == TOKENIZER.digest
    content["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).digest != TOKENIZER.digest
    assert len(TOKENIZER.digest) == 64


def test_both_shipped_models_share_the_tokenizer() -> None:
    assert Tokenizer.load(SHIPPED / "public").digest == TOKENIZER.digest


def test_a_file_without_a_model_type_loads(tmp_path: Path) -> None:
    """GPT-2's own tokenizer.json is older than the field, and writes merges as strings."""
    content = json.loads((SHIPPED / "private" / "tokenizer.json").read_text())
    del content["model"]["type"]
    content["model"]["merges"] = [
        m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).encode("def f(x):") == TOKENIZER.encode("def f(x):")


def changed(directory: Path, change: Callable[[Any], None]) -> Tokenizer:
    """Return the shipped tokenizer with other content, which lies in `directory` then."""
    content = json.loads((SHIPPED / "private" / "tokenizer.json").read_text())
    change(content)
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(directory)


TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": END_OF_TEXT,
}


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(truncation=TRUNCATION),
        lambda c: c.update(padding=PADDING),
        lambda c: c["model"].update(dropout=0.9),
        lambda c: (c.pop("truncation"), c.pop("padding"), c["model"].pop("dropout")),
    ],
    ids=["truncation", "padding", "dropout", "none"],
)
def test_a_text_is_read_whole(tmp_path: Path, change: Callable[[Any], None]) -> None:
    """What a tokenizer was trained with cuts no text, fills none up, and leaves no merge out."""
    actual, text = changed(tmp_path, change), "def read(path):\n    return path\n" * 40
    assert actual.encode(text) == TOKENIZER.encode(text)
    assert actual.decode(actual.encode(text)) == text
    assert actual.digest == TOKENIZER.digest


def test_digest_is_of_the_meaning(tmp_path: Path) -> None:
    def spelt(content: Any) -> None:
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
        del content["model"]["ignore_merges"], content["decoder"]["use_regex"]

    actual = changed(tmp_path, spelt)
    assert actual.digest == TOKENIZER.digest
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    canonical = json.dumps(written, sort_keys=True, separators=(",", ":"))
    of_old_keys = hashlib.sha256(canonical.encode()).hexdigest()
    assert of_old_keys != actual.digest
    assert actual.is_named(of_old_keys) and actual.is_named(actual.digest)
    assert TOKENIZER.is_named(actual.digest) and not TOKENIZER.is_named(of_old_keys)


@pytest.fixture(scope="module")
def with_added(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Return ours and the library's, with added tokens of plain and of accented letters."""
    directory = tmp_path_factory.mktemp("added")

    def add(content: Any) -> None:
        one = content["added_tokens"][0] | {"special": False}
        for number, name in enumerate(ADDED, start=4096):
            content["added_tokens"].append(one | {"id": number, "content": name})

    actual = changed(directory, add)
    return actual, tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


ADDED = ("<tool>", "    ", "caf\u00e9", "<\u00fcber\u00a0gro\u00df>", "\u6f22\u5b57")
PARTS = st.one_of(st.sampled_from(ADDED), st.text(st.characters(codec="utf-8"), max_size=5))


@EXAMPLES
@given(st.lists(PARTS, max_size=8).map("".join))
def test_added_tokens_stand_for_their_letters(
    with_added: tuple[Tokenizer, tokenizers.Tokenizer], text: str
) -> None:
    """The library agrees where these are no letters that it takes for bytes."""
    ours, library = with_added
    ids = ours.encode(text)
    assert ids == library.encode(text).ids
    assert ours.decode(ids) == text.replace(END_OF_TEXT, "")
    if not {4098, 4099} & set(ids):
        assert ours.decode(ids) == library.decode(ids, skip_special_tokens=True)


def test_a_token_that_merges_make_is_bytes_even_if_it_is_added(tmp_path: Path) -> None:
    def add(content: Any) -> None:
        number = content["model"]["vocab"]["\u0120def"]
        one = content["added_tokens"][0] | {"special": False}
        content["added_tokens"].append(one | {"id": number, "content": "\u0120def"})

    actual = changed(tmp_path, add)
    assert actual.decode(actual.encode("a def")) == "a def"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda c: c.update(decoder={"type": "Sequence", "decoders": [c["decoder"]] * 2}),
            "is not a byte-level BPE",
        ),
        (
            lambda c: c.update(
                post_processor={
                    "type": "TemplateProcessing",
                    "pair": [],
                    "single": [
                        {"SpecialToken": {"id": "<s>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                    "special_tokens": {"<s>": {"id": "<s>", "ids": [5000], "tokens": ["<s>"]}},
                }
            ),
            "adds tokens to a text that it does not have",
        ),
        (
            lambda c: c.update(
                post_processor={
                    "type": "Sequence",
                    "processors": [
                        {
                            "type": "TemplateProcessing",
                            "pair": [],
                            "special_tokens": {},
                            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                        }
                    ],
                }
            ),
            "adds tokens to a text that it does not have",
        ),
    ],
    ids=["decoded twice", "adds what there is not", "does not say what it adds"],
)
def test_a_tokenizer_that_does_not_fit(
    tmp_path: Path, change: Callable[[Any], None], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        changed(tmp_path, change)


def test_a_text_that_a_tokenizer_has_no_tokens_for(tmp_path: Path) -> None:
    def change(content: Any) -> None:
        content["model"]["unk_token"] = "<unk>"
        for parts in (content["pre_tokenizer"], content["decoder"]):
            parts["use_regex"] = False
        content["pre_tokenizer"] = {"type": "Digits", "individual_digits": False}

    actual = changed(tmp_path, change)
    with pytest.raises(InputError, match="cannot read the text"):
        actual.encode("\u6f22")


def _without_end_of_text() -> str:
    content = json.loads((SHIPPED / "private" / "tokenizer.json").read_text())
    content["added_tokens"] = []
    content["model"]["vocab"]["|end|"] = content["model"]["vocab"].pop(END_OF_TEXT)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "tokenizer.json is missing"),
        ("{", "is not valid JSON"),
        ("[1]", "is not a byte-level BPE"),
        ('{"model": {"type": "WordPiece"}}', "is not a byte-level BPE"),
        (
            '{"model": {"type": "BPE", "vocab": 3}, "decoder": {"type": "ByteLevel"}}',
            "has no vocabulary of BPE's or Unigram's",
        ),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}}',
            "is not a valid tokenizer",
        ),
        (_without_end_of_text(), "has no token <|endoftext|>"),
    ],
)
def test_faults(tmp_path: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InputError) as caught:
        Tokenizer.load(tmp_path)
    message = str(caught.value)
    assert expected in message and str(tmp_path) in message and "\n" not in message


def test_directory_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a directory"):
        Tokenizer.load(tmp_path / "absent")


# ---- SentencePiece's kind, as LLaMA has it


def load(directory: Path, library: tokenizers.Tokenizer, **files: Any) -> Tokenizer:
    """Load the tokenizer with the content of further files beside it."""
    library.save(str(directory / "tokenizer.json"))
    for name, content in ({"config": {"eos_token_id": 2}} | files).items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.load(directory)


@pytest.fixture(scope="module", params=["first", "metaspace"])
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the library's tokenizer, and ours of its file."""
    library = sentencepiece(request.param)
    return library, load(tmp_path_factory.mktemp("tokenizer"), library)


@EXAMPLES
@given(text=st.text("helo wrd\né漢🙂"), chunks=st.lists(st.integers(0, 3)))
def test_sentencepiece_decodes_what_it_encodes(both: Any, text: str, chunks: list[int]) -> None:
    """As the library does, but for the first space, which the library strips."""
    library, ours = both
    ids = ours.encode(text)
    assert ids == library.encode(text).ids and ids[0] == 1
    decoded = library.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids) == (f" {decoded}" if text else "")
    pushes, rest = stream(ids, chunks, ours)
    assert "".join(pushes) == ours.decode(ids) and rest == ""


def test_a_sentencepiece_stream_goes_on_within_words(both: Any) -> None:
    _, ours = both
    ids = ours.encode("hello wé")[1:]
    pushes, rest = stream(ids, [1] * len(ids), ours)
    assert pushes == [" hel", "lo", " w", "", "é", ""] and rest == ""
    assert stream(ids[2:-1], [], ours) == ([" w"], "\ufffd")
    assert ours.decode([0, 1, 2, ours.vocab_size]) == ""


def test_what_a_tokenizer_puts_after_a_text_is_left_out(tmp_path: Path) -> None:
    """A text goes on; the end of it would begin another one."""
    library = sentencepiece("first")
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    ids = load(tmp_path, library).encode("hello</s>hello")
    whole = library.encode("hello</s>hello").ids
    assert whole == [*ids, 2] and ids[0] == 1 and 2 in ids[1:-1]


def test_what_it_puts_before_a_text_begins_what_is_public(tmp_path: Path) -> None:
    library = sentencepiece("first")
    library.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    ours = load(tmp_path, library)
    assert ours.beginning == []
    assert encoded("", "hello", ours) == ([], ours.encode("hello"))
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    ours = load(tmp_path, library)
    assert ours.beginning == [1]
    own = ours.encode("hello", goes_on=True)
    assert encoded("", "hello", ours) == ([1], own)
    assert encoded("a", "hello", ours) == (ours.encode("a"), own)
    assert ours.encode("a")[0] == 1 and 1 not in own


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip("h", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁▁", " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Metaspace(), decoders.Metaspace()]),
    ],
    ids=["order", "strips the end", "strips letters", "several letters", "twice"],
)
def test_decoders_that_take_more_than_a_token_are_refused(tmp_path: Path, decoder: Any) -> None:
    library = sentencepiece("first")
    library.decoder = decoder
    with pytest.raises(InputError, match="nor one of SentencePiece's"):
        load(tmp_path, library)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config": {"eos_token_id": [2, 5]}, "config": {"eos_token_id": 1}}, {2, 5}),
        ({"generation_config": {"bos_token_id": 1}, "config": {"eos_token_id": 1}}, {1}),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "</s>"}}, {2}),
        ({"config": {}, "tokenizer_config": {"eos_token": {"content": "<s>"}}}, {1}),
    ],
)
def test_ends_of_text(tmp_path: Path, files: dict[str, Any], ends: set[int]) -> None:
    assert load(tmp_path, sentencepiece("first"), **files).eos_ids == ends


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": "2"}}, 'config.json has eos_token_id "2"; it must be'),
        ({"generation_config": {"eos_token_id": []}}, "generation_config.json has eos_token_id []"),
        ({"config": {"eos_token_id": [True]}}, "config.json has eos_token_id [true]"),
        ({"config": {"eos_token_id": 9999}}, "config.json has eos_token_id 9999; it must be"),
        ({"config": {"eos_token_id": -1}}, "config.json has eos_token_id -1; it must be"),
        ({"config": {"eos_token_id": 2**70}}, "config.json has eos_token_id 118"),
        ({"config": {}}, "has no token <|endoftext|>"),
        ({"config": {}, "tokenizer_config": {"eos_token": "<end>"}}, 'has no token "<end>"'),
    ],
)
def test_no_end_of_text(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, sentencepiece("first"), **files)
    assert expected in str(caught.value) and str(tmp_path) in str(caught.value)
