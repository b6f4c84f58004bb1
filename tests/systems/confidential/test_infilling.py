"""The prompt for infilling: what a public model reads before it fills a gap, by its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from models.tokenizer import Tokenizer
from spu_llm.systems.confidential import published
from spu_llm.systems.confidential.infilling import Infilling
from spu_llm.systems.confidential.obfuscation import Public
from tests.kit.models import save_tokenizer
from tests.systems.confidential.toys import prompt_of, public_of, shipped


def test_a_model_that_knows_no_gaps_reads_words(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    tokens = tokenizer.encode("def read(path):")
    infilling = Infilling.of(tokenizer)
    context = infilling.context(tokens, range(2, 4))
    text, before = tokenizer.decode(context), tokenizer.decode(tokens[:2])
    after = tokenizer.decode(tokens[4:])
    assert text == (
        f"A text with a gap: {before} ____ {after}\nThe same text without the gap: {before}"
    )
    assert len(context) + 2 <= infilling.room(len(tokens))


def test_a_model_that_was_trained_for_it_has_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    size = len(content["model"]["vocab"])
    like = {key: False for key in ("single_word", "lstrip", "rstrip", "normalized")}
    taken = {token["id"] for token in content["added_tokens"]}
    first = max(size, *(taken or {0})) + (max(taken, default=-1) >= size)
    for i, name in enumerate(names):
        content["added_tokens"].append({"id": first + i, "content": name, "special": True, **like})
    path.write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    infilling = Infilling.of(tokenizer)
    special = [tokenizer.special_tokens[name] for name in names]
    assert infilling.context([7, 8, 9], range(1, 2)) == [special[0], 7, special[1], 9, special[2]]


def test_fakes_follow_the_text_after_the_target_too() -> None:
    """Of the shipped model: another text after it, other probabilities."""
    public = shipped()
    asked = Public(public.scorer, public.tokenizer, infilling=Infilling.of(public.tokenizer))
    first, second = (
        prompt_of(asked, f"import <redacted>name</redacted>{after}") for after in (" as n", "(x)")
    )
    made = [
        published.as_printed(asked, prompt, prompt.targets[0], 0.9, 8).target
        for prompt in (first, second)
    ]
    assert not np.isclose(*made)


def test_where_there_is_no_other_text_a_texts_end_is_read() -> None:
    public = public_of(0)
    assert public.around([3], range(1)) == [0]
