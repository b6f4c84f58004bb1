"""A draft model kept without what it has of its private model."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.alignment import changed
from models.alignment.run import CURVE
from models.alignment.student import of_blocks
from models.family import family_of
from models.files import WEIGHTS_FILE
from models.hf import load_uncalibrated, save_model
from models.llama import LlamaConfig
from spu_llm.core.errors import InputError
from tests.kit.models import VOCAB, save_tokenizer

CONFIG = LlamaConfig(VOCAB, 32, 8, 16, 3, 2, 1)
TABLE = "model.embed_tokens.weight"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return a draft model of two blocks of a private one, a block of which moved; and that one."""
    private, draft = tmp_path / "private", tmp_path / "draft"
    params = family_of(CONFIG).init(CONFIG, jax.random.key(0))
    save_model(private, CONFIG, params)
    save_tokenizer(private)
    begun = of_blocks(CONFIG, params, [0, 2])
    moved = jax.tree.map(lambda w: np.asarray(w) + 1, begun.params["blocks"][1])
    save_model(draft, begun.config, {**begun.params, "blocks": [begun.params["blocks"][0], moved]})
    (draft / CURVE).write_text("{}")
    return draft, private


def test_a_draft_model_comes_back_whole(pair: tuple[Path, Path], tmp_path: Path) -> None:
    draft, private = pair
    names = changed.take(draft, private, tmp_path / "kept")
    kept = load_file(tmp_path / "kept" / WEIGHTS_FILE)
    assert TABLE in names and not set(names) & set(kept)
    assert all(".1." in name for name in kept)  # only the block that moved
    changed.complete(tmp_path / "kept", private, tmp_path / "again")
    wanted, again = (load_uncalibrated(path) for path in (draft, tmp_path / "again"))
    assert wanted[0] == again[0]
    jax.tree.map(np.testing.assert_array_equal, wanted[1], again[1])
    assert (tmp_path / "again" / CURVE).read_text() == "{}"
    text = "tokenizer.json"
    assert (tmp_path / "again" / text).read_bytes() == (private / text).read_bytes()


def test_another_private_model_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, private = pair
    changed.take(draft, private, tmp_path / "kept")
    tensors = load_file(private / WEIGHTS_FILE)
    tensors[TABLE] = tensors[TABLE] * 2
    save_file(tensors, private / WEIGHTS_FILE)
    out = tmp_path / "again"
    with pytest.raises(InputError, match=f"another {TABLE}"):
        changed.complete(tmp_path / "kept", private, out)
    assert not out.exists()
    given = [str(path) for path in (tmp_path / "kept", private, out)]
    assert changed.main(["complete", *given]) == 2
    assert "give that model" in capsys.readouterr().err


def test_a_whole_model_says_not_what_is_left_out(pair: tuple[Path, Path], tmp_path: Path) -> None:
    draft, private = pair
    with pytest.raises(InputError, match="does not say what is left out"):
        changed.complete(draft, private, tmp_path / "again")
    (draft / WEIGHTS_FILE).write_bytes(b"x")
    with pytest.raises(InputError, match="cannot be read"):
        changed.complete(draft, private, tmp_path / "again")
