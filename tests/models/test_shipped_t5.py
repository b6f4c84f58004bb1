"""The T5 pair's card states what its files are, and its public model drafts for its private one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.encoder_decoder import source_logits
from models.family import check_ranges, family_of
from models.hf import load_model
from models.t5 import T5Config
from models.text_format import TextFormat
from models.training import train_t5
from models.training.snippets import SHIPPED, read_snippets

T5 = SHIPPED / "t5"
CARD = (T5 / "README.md").read_text(encoding="utf-8")
SOURCE, TEXT = 48, 64


def cells(row: str) -> list[str]:
    """Return the cells of the card's row of this name: private, public."""
    (line,) = re.findall(rf"^\| {row} \| (.*) \|$", CARD, re.MULTILINE)
    return str(line).split(" | ")


@pytest.mark.parametrize("column", [0, 1], ids=["private", "public"])
def test_the_table_is_that_of_the_files(column: int) -> None:
    name = ("private", "public")[column]
    schedule = (train_t5.PRIVATE_SCHEDULE, train_t5.PUBLIC_SCHEDULE)[column]
    config, params = load_model(T5 / name, encoders=True)
    assert isinstance(config, T5Config)
    file = T5 / name / "model.safetensors"
    parameters = sum(int(np.prod(t.shape)) for t in load_file(file).values())
    assert cells("architecture")[column] == (
        f"{config.num_layers} + {config.num_decoder_layers} blocks, width {config.d_model}, "
        f"{config.num_heads} heads of {config.d_kv}"
    )
    assert cells("parameters")[column] == f"{parameters / 1e6:.2f} million"
    assert cells("file, float16")[column] == f"{file.stat().st_size / 1e6:.1f} MB"
    assert file.stat().st_size < 5e6
    assert f"{config.n_positions} tokens each" in cells("source, and what is written")[column]
    assert f"{schedule.steps:,} steps of {schedule.batch} pairs" in cells("trained with")[column]
    if name == "private":
        check_ranges(family_of(config).fold(params, config), config)


def test_both_write_the_same_way() -> None:
    private, public = (TextFormat.of_model(T5 / name) for name in ("private", "public"))
    assert private.tokenizer.digest == public.tokenizer.digest
    assert private.after_prompt == public.after_prompt == (1, 0)
    for snippet in read_snippets()[:8]:
        ids = private.tokenizer.encode(snippet.text)
        assert private.tokenizer.decode(ids) == snippet.text


def test_drafts_stay() -> None:
    """On held-out text, at temperature 1: the sum of min(p, q), over 512 places."""
    tokenizer = TextFormat.of_model(T5 / "private").tokenizer
    texts = [tokenizer.encode(s.text)[: SOURCE + TEXT] for s in read_snippets()]
    rows = np.array([ids for ids in texts if len(ids) == SOURCE + TEXT][:8])
    sources = np.pad(rows[:, :SOURCE], [(0, 0), (0, 1)], constant_values=1)
    begun = np.pad(rows[:, SOURCE:-1], [(0, 0), (1, 0)], constant_values=0)
    each = []
    for name in ("private", "public"):
        config, params = load_model(T5 / name, encoders=True)
        scores = jax.jit(jax.vmap(lambda s, t, p=params, c=config: source_logits(p, c, s, t)))(
            jnp.asarray(sources), jnp.asarray(begun)
        )
        each.append(np.asarray(jax.nn.softmax(scores)))
    p, q = each
    assert p.shape == (8, TEXT, tokenizer.vocab_size)
    overlap = float(np.minimum(p, q).sum(axis=-1).mean())
    assert 0.65 < overlap < 0.85
    told = np.take_along_axis(np.log(p), rows[:, SOURCE:, None], axis=-1)
    assert -6.0 < float(told.mean()) < -3.0
