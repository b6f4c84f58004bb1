"""Unigram tokenizers as T5 has them: texts as the library reads and writes them, sentinels, and the
tokens between a prompt and a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from models.stops import Stops
from models.text_format import TextFormat
from models.tokenizer import StreamDecoder, Tokenizer
from models.training.unigram import sentinels_of, train_unigram, write_unigram
from spu_llm.api.texts import tokens_of_prompt
from spu_llm.core.errors import InputError

TEXTS = ["def read(path):\n    return path\n", "the quick brown fox jumps over the lazy dog"] * 8
PIECES = ["▁", "▁the", "▁fox", "the", "fox", "t", "h", "e", "f", "o", "x", "er", "s", "Z"]


def published(prepend: str = "always") -> tokenizers.Tokenizer:
    """Return a tokenizer with the parts of T5's."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab += [(piece, -1.0 - i / 8) for i, piece in enumerate(PIECES)]
    made = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=2))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme=prepend)]
    )
    made.decoder = decoders.Metaspace(prepend_scheme=prepend)
    made.add_special_tokens(["<pad>", "</s>", "<unk>", "<extra_id_1>", "<extra_id_0>"])
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return made


def saved(directory: Path, made: tokenizers.Tokenizer, **config: Any) -> Path:
    made.save(str(directory / "tokenizer.json"))
    stated = {"is_encoder_decoder": True, "decoder_start_token_id": 0, "eos_token_id": 1, **config}
    (directory / "config.json").write_text(json.dumps(stated))
    return directory


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(saved(tmp_path_factory.mktemp("own"), published()))


def test_a_text_has_the_library_s_tokens(own: Tokenizer) -> None:
    library = published()
    for text in ("the fox", "other foxes", "the <extra_id_0> fox", "Zoë"):
        assert [*own.encode(text), 1] == library.encode(text).ids
    assert own.ending == [1] and own.beginning == [] and own.prepends
    assert own.vocab_size == library.get_vocab_size() == len(PIECES) + 5


@given(
    st.lists(st.integers(3, len(PIECES) + 2), max_size=8),
    st.lists(st.integers(1, 3), min_size=8, max_size=8),
)
def test_a_text_that_begins_is_as_the_library_writes_it(ids: list[int], chunks: list[int]) -> None:
    tokenizer, text, at = _TOKENIZER, "", 0
    decoder = StreamDecoder(tokenizer, begins=True)
    for chunk in chunks:
        text += decoder.push(ids[at : at + chunk])
        at += chunk
    text += decoder.push(ids[at:]) + decoder.finish()
    assert text == published().decode(ids)
    goes_on = "".join(StreamDecoder(tokenizer).push([i]) for i in ids)
    assert goes_on == tokenizer.decode(ids) == (" " if goes_on.startswith(" ") else "") + text


def _loaded() -> Tokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer.load(saved(Path(directory), published()))


_TOKENIZER = _loaded()


def test_sentinels_are_text_and_other_special_tokens_are_not(own: Tokenizer) -> None:
    assert own.special_tokens == {"<pad>": 0, "</s>": 1, "<unk>": 2}
    one, other = own.vocab_size - 2, own.vocab_size - 1
    ids = [other, 4, one, 1, 0]
    assert own.decode(ids) == "<extra_id_0> the<extra_id_1>"


def test_what_is_trained_keeps_all_of_a_text(tmp_path: Path) -> None:
    made = train_unigram(TEXTS, 60, 4)
    write_unigram(tmp_path, made, 64)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == made.get_vocab_size() <= 60
    assert [*sentinels_of(made)] == [tokenizer.vocab_size - 1 - i for i in range(4)]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_ids == {1} and tokenizer.ending == [1] and not tokenizer.prepends


# ---- the tokens after a prompt


def test_a_prompt_ends_with_what_the_model_wants(tmp_path: Path) -> None:
    text = TextFormat.of_model(saved(tmp_path, published()))
    assert text.after_prompt == (1, 0)
    again = TextFormat.parse(text.document)
    assert (again.after_prompt, again.digest) == (text.after_prompt, text.digest)
    public, tokens = tokens_of_prompt("", "the fox", text)
    assert public == [] and tokens == [*text.tokenizer.encode("the fox"), 1, 0]
    with pytest.raises(InputError, match="reads all of a prompt at once"):
        tokens_of_prompt("the", "fox", text)


def test_a_config_that_leaves_the_encoder_out(tmp_path: Path) -> None:
    """A T5 has one, whether its config.json says so or not."""
    (saved(tmp_path, published()) / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert TextFormat.of_model(tmp_path).after_prompt == (1, 0)


def test_a_stop_may_have_a_sentinel_and_more(own: Tokenizer) -> None:
    stops = Stops.of(["<extra_id_0> the", "</s>"], own)
    assert stops.texts == ("<extra_id_0> the", "</s>") and stops.tokens == {1}


def test_a_model_without_an_encoder_wants_nothing(tmp_path: Path) -> None:
    text = TextFormat.of_model(saved(tmp_path, published(), is_encoder_decoder=False))
    assert text.after_prompt == () and b"after_prompt" not in text.document
    assert tokens_of_prompt("", "fox", text)[1] == text.tokenizer.encode("fox", goes_on=True)


def test_a_start_token_that_is_none(tmp_path: Path) -> None:
    directory = saved(tmp_path, published(), decoder_start_token_id=19)
    with pytest.raises(InputError, match="decoder_start_token_id that is no token"):
        TextFormat.of_model(directory)


@pytest.mark.parametrize("after", [5, [19], [-1], [True], ["1"], [1] * 17, None, {}])
def test_a_document_with_other_tokens_after_a_prompt(tmp_path: Path, after: Any) -> None:
    content = json.loads(TextFormat.of_model(saved(tmp_path, published())).document)
    with pytest.raises(InputError, match="after_prompt that is no list of few tokens"):
        TextFormat.parse(json.dumps(content | {"after_prompt": after}).encode())


# ---- files that are none


def _set(*path: Any) -> Callable[[Any], None]:
    *way, last, value = path

    def change(content: Any) -> None:
        for part in way:
            content = content[part]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_set("model", "vocab", 5, ["▁the"]), "pieces that are no text with a score"),
        (_set("model", "vocab", 5, ["▁the", "-1"]), "pieces that are no text with a score"),
        (_set("model", "vocab", 5, [5, -1.0]), "pieces that are no text with a score"),
        (_set("model", "vocab", 5, ["▁", -1.0]), "a piece twice"),
        (_set("model", "vocab", []), "gives|is not a valid tokenizer|has tokens up to"),
        (_set("model", "vocab", "▁the"), "no vocabulary of BPE's or Unigram's kind"),
        (_set("model", "unk_id", 99), "is not a valid tokenizer|cannot read"),
        (_set("model", "type", "WordPiece"), "is not a byte-level BPE tokenizer"),
        (_set("decoder", {"type": "ByteLevel"}), "is not a byte-level BPE tokenizer"),
    ],
)
def test_a_file_that_is_no_unigram_tokenizer(
    tmp_path: Path, change: Callable[[Any], None], expected: str
) -> None:
    path = saved(tmp_path, published()) / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=expected):
        Tokenizer.load(tmp_path)


def test_a_text_without_a_token_for_the_unknown(tmp_path: Path) -> None:
    path = saved(tmp_path, published()) / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["unk_id"] = None
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="cannot read the text|is not a valid tokenizer"):
        Tokenizer.load(tmp_path).encode("Ω")
