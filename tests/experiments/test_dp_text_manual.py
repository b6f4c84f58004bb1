"""The study of private text on sentences of a manual, which a model is asked for in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.dp_text import inputs
from experiments.dp_text.command import pair_of
from experiments.dp_text.docstrings import summaries
from experiments.dp_text.manual import sentences
from models.tokenizer import Tokenizer
from spu_llm.app import cli
from spu_llm.core.errors import InputError
from spu_llm.systems.dp_text import generator
from spu_llm.systems.dp_text.baselines.augpe import STYLES

PAGES = {
    "loops": (
        "The loop\n********\n\n"
        'The "for" statement\nis a loop. It ends after the last item.  See also\n'
        "section\nLoops.\n\n"
        "   for x in y:\n       The code is not prose.\n\n"
        "Changed in version 3.1: and no end"
    ),
    "calls": "A call\n******\n\nA call names a function. lower case is left out.\n",
}
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% endfor %}<assistant>"
)


def with_pages(root: Path, pages: dict[str, str]) -> Path:
    """Return a standard library that has only pages of its manual."""
    (root / "pydoc_data").mkdir(parents=True)
    text = f"# made\ntopics = {pages!r}\n"
    (root / "pydoc_data" / "topics.py").write_text(text, encoding="utf-8")
    return root


def test_sentences_are_prose_in_the_order_of_topics(tmp_path: Path) -> None:
    assert list(sentences(with_pages(tmp_path, PAGES))) == [
        ("calls", "A call names a function. lower case is left out."),
        ("loops", 'The "for" statement is a loop.'),
        ("loops", "It ends after the last item."),
        ("loops", "See also section Loops."),
    ]


def test_summaries_are_first_sentences_outside_of_tests(tmp_path: Path) -> None:
    files = {
        "b.py": '"""A module of\nits own.  More of it.\n\nAnd more."""\n',
        "b_lower.py": '"""lower."""\n',
        "a/c.py": 'class C:\n    """A class."""\n    def f(self):\n        """No end"""\n',
        "a/test/d.py": '"""A test."""\n',
        "site-packages/e.py": '"""A package."""\n',
        "broken.py": "def (",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert list(summaries(tmp_path)) == [("a/c.py", "A class."), ("b.py", "A module of its own.")]


@pytest.mark.parametrize("text", [None, "import os\n", "topics = print(1)\n", "topics = ("])
def test_a_library_without_pages_is_refused(tmp_path: Path, text: str | None) -> None:
    library = with_pages(tmp_path, {})
    path = library / "pydoc_data" / "topics.py"
    path.unlink() if text is None else path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="has no pages of Python's language reference"):
        list(sentences(library))


def test_this_interpreter_has_enough_sentences(tiny_pair: tuple[Path, Path]) -> None:
    tokenizer = Tokenizer.load(tiny_pair[0])
    texts = inputs.corpus(tokenizer, 200, inputs.ORIGINS["manual"])
    assert len(texts.references) > 3 * 40 and len(texts.real) > 80
    assert texts.facts["parts"] == "topics" and texts.facts["sides"]["real"]["files"] > 10


@pytest.mark.parametrize("chats", [False, True])
def test_a_sentence_is_asked_for_in_words(
    chats: bool, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """As a chat where the model has a template; any token with the end of a line ends a text."""
    if chats:
        config = {"chat_template": TEMPLATE, "bos_token": "", "eos_token": ""}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.load(tiny_pair[0])
    origin = inputs.ORIGINS["manual"]
    prompts = origin.prompts(tmp_path, tokenizer, 1000, 40)
    private, public = (
        tokenizer.decode(tokens) for tokens in (prompts.private("A call ends."), prompts.public)
    )
    around = (f"<system>{inputs.SYSTEM}<user>", "<assistant>") if chats else ("", "")
    assert origin.words is not None
    written = origin.words.private.format(text="A call ends.")
    assert private.endswith(written.join(around))
    assert public.endswith(origin.words.public.join(around))
    varied = origin.variations(tmp_path, prompts.tokenizer, 1000, 40)
    asked = tokenizer.decode(varied[1].private("A call ends."))
    words = origin.words.variation.format(style=STYLES[1], text="A call ends.")
    assert asked.endswith(words.join(around)) and len(varied) == len(STYLES)
    ends = prompts.tokenizer.eos_ids - tokenizer.eos_ids
    assert (
        ends == {i for i in range(tokenizer.vocab_size) if "\n" in tokenizer.decode([i])} and ends
    )
    assert prompts.reference_tokens == 40
    with pytest.raises(InputError, match="the model has 64 positions"):
        origin.prompts(tmp_path, tokenizer, 64, 40)


def test_a_named_model_is_its_own_measure(tiny_pair: tuple[Path, Path]) -> None:
    """Perplexity is under the model itself unless another one of the same tokens is named."""

    def models(*options: str) -> tuple[Path, Path]:
        return pair_of(cli.command_line().parse_args(["experiment", "dp-text", *options]))

    private, public = map(str, tiny_pair)
    assert models("--model", private) == (tiny_pair[0], tiny_pair[0])
    assert models("--model", private, "--draft-model", public) == tiny_pair
    shipped = models()
    assert shipped[0].name == "private" and shipped[1].name == "public"
    with pytest.raises(InputError, match="another tokenizer"):
        models("--draft-model", public)


@pytest.mark.slow
def test_the_command_measures_sentences(
    tmp_path: Path, tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {
        f"t{i}": f"T\n\nThe {chr(97 + i) * 2} ends it. A {chr(97 + i) * 3}.\n" for i in range(26)
    }
    library = with_pages(tmp_path / "library", pages)
    monkeypatch.setattr(inputs, "library_directory", lambda: library)
    words = inputs.Words("{text} so", "so", "{text} or")
    short = replace(inputs.ORIGINS["manual"], words=words)
    monkeypatch.setitem(inputs.ORIGINS, "manual", short)
    monkeypatch.setattr(generator, "MOST_TOGETHER", 2)  # the first ones compile
    file = tmp_path / "result.json"
    options = "--corpus manual --methods public-only,invisibleink --epsilon 10 --batch 2 --top-k 5"
    sizes = f"--texts 3 --tokens 18 --model {tiny_pair[0]} --json {file}"
    with pytest.raises(SystemExit) as end:
        cli.main(["experiment", "dp-text", *options.split(), *sizes.split()])
    assert not end.value.code
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["query"] == "so" and result["plan"]["corpus"] == "manual"
    real, alone, private = result["rows"]
    assert "processor_s" not in real and min(alone["processor_s"], private["processor_s"]) > 0
    assert private["calls"] == 3 and private["effective_k"][0] >= 5
