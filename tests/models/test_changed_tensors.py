"""A draft model kept without what it has of its private model."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.alignment import changed
from models.alignment.run import ANSWERS, CURVE
from models.alignment.student import of_blocks
from models.family import family_of
from models.files import WEIGHTS_FILE
from models.hf import load_uncalibrated, save_model
from models.llama import LlamaConfig
from spu_llm.app import draft_tensors
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
    assert draft_tensors.main(["complete", *given]) == 2
    assert "give that model" in capsys.readouterr().err


def test_what_cannot_be_used_is_refused_in_a_line(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, private = pair
    kept, out, file = tmp_path / "kept", tmp_path / "again", tmp_path / "file"
    changed.take(draft, private, kept)
    file.write_text("")
    weights = (kept / WEIGHTS_FILE).read_bytes()
    aligned = tmp_path / "aligned"
    (aligned / ANSWERS).mkdir(parents=True)
    of_bfloat16 = tmp_path / "bfloat16"
    other = {TABLE: np.zeros((2, 2), jax.numpy.bfloat16)}
    of_bfloat16.mkdir()
    save_file(other, of_bfloat16 / WEIGHTS_FILE)

    def refused(action: str, read: Path, beside: Path, written: Path) -> str:
        assert draft_tensors.main([action, str(read), str(beside), str(written)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "written over" in refused("complete", kept, private, private)
    assert "written over" in refused("take", draft, private, draft)
    assert "an alignment of its own" in refused("complete", kept, private, aligned)
    assert "cannot be made" in refused("complete", kept, private, file)
    assert "does not say what is left out" in refused("complete", draft, private, out)
    assert "no tensor" in refused("take", draft, of_bfloat16, out)
    for said in ("x", "[]", '{"a": 1}'):
        save_file(load_file(kept / WEIGHTS_FILE), kept / WEIGHTS_FILE, {"left_out": said})
        assert "does not say" in refused("complete", kept, private, out)
    (kept / WEIGHTS_FILE).write_bytes(weights[:-9])
    assert "cannot be read" in refused("complete", kept, private, out)
    (kept / WEIGHTS_FILE).write_bytes(weights)
    (kept / CURVE).unlink()
    assert f"{CURVE} is missing" in refused("complete", kept, private, out)
    (draft / CURVE).unlink()
    assert f"{CURVE} is missing" in refused("take", draft, private, out)
    assert not out.exists() and load_uncalibrated(private)
