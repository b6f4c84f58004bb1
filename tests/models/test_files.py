"""What a model directory from anybody can hold: links, and JSON that takes more than it says."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from models.files import RANGES_FILE, files_of
from models.hf import load_model, save_ranges
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from tests.kit.models import PUBLIC, make_pair

NAMES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory with all files that are read."""
    directory = make_pair(tmp_path_factory.mktemp("pair"))[1]
    (directory / "generation_config.json").write_text('{"eos_token_id": 0}')
    save_ranges(directory / RANGES_FILE, PUBLIC)
    return directory


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    """Return a copy of it, to be changed."""
    return Path(shutil.copytree(made, tmp_path / "model"))


def loaded(directory: Path) -> None:
    load_model(directory)
    Tokenizer.load(directory)


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        loaded(directory)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    for word in words:
        assert word in message, message


def snapshot(model: Path, root: Path) -> Path:
    """Return the model as a Hugging Face cache keeps it."""
    cache = root / "models--some--model"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for file in model.iterdir():
        blob = cache / "blobs" / f"blob-of-{file.name}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs", blob.name))
    return snapshot


def test_a_model_in_a_cache_is_read_from_its_blobs(model: Path, tmp_path: Path) -> None:
    names = {file.name for file in model.iterdir()}
    actual = snapshot(model, tmp_path)
    loaded(actual)
    assert {file.name for file in files_of(actual)} == {f"blob-of-{name}" for name in names}
    (tmp_path / "link").symlink_to(actual)
    loaded(tmp_path / "link")


def test_links_within_a_directory_are_followed(model: Path) -> None:
    """As in a volume of Kubernetes."""
    (model / "..data").mkdir()
    for name in NAMES:
        (model / name).rename(model / "..data" / name)
        (model / name).symlink_to(Path("..data", name))
    loaded(model)
    assert all(file.is_file() and not file.is_symlink() for file in files_of(model))


@pytest.mark.parametrize("name", [*NAMES, "ranges.json"])
def test_a_link_out_of_a_model_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    (model / name).rename(tmp_path / "elsewhere")
    (model / name).symlink_to(tmp_path / "elsewhere")
    refused(model, str(model / name), "a link that leads out", "put the file itself there")
    with pytest.raises(InputError, match="leads out"):
        files_of(model)


def test_a_link_to_blobs_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    actual = snapshot(model, tmp_path)
    other = tmp_path / "models--some--other" / "blobs"
    shutil.copytree(tmp_path / "models--some--model" / "blobs", other)
    (actual / "config.json").unlink()
    (actual / "config.json").symlink_to(other / "blob-of-config.json")
    refused(actual, "leads out")


def test_blobs_that_are_a_link_themselves_are_refused(model: Path, tmp_path: Path) -> None:
    actual = snapshot(model, tmp_path)
    blobs = actual.parents[1] / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    refused(actual, "leads out")


def test_ranges_are_not_written_through_a_link(model: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (model / "ranges.json").unlink()
    (model / "ranges.json").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="leads out"):
        save_ranges(model / RANGES_FILE, PUBLIC)
    assert (tmp_path / "precious").read_text() == "precious"


JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "ranges.json")


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[" * 100_000, "nested in more than 32 levels"),
        ('{"a":' * 40 + "0" + "}" * 40, "nested in more than 32 levels"),
        ('{"a": 1, "b": 2, "a": 1}', 'not valid JSON ("a" is there twice)'),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON"),
        (" " * (64 << 20) + " 1", "MB; copy it again"),
    ],
    ids=["deep", "nested", "twice", "long number", "large"],
)
def test_json_is_bounded(model: Path, name: str, content: str, expected: str) -> None:
    (model / name).write_text(content)
    refused(model, str(model / name), expected)


def change_tokenizer(model: Path, change: Callable[[dict[str, object]], None]) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("place", ["vocab", "added_tokens"])
def test_one_large_number_of_a_token_costs_nothing(model: Path, place: str) -> None:
    def change(content: dict) -> None:  # type: ignore[type-arg]
        if place == "vocab":
            content["model"]["vocab"]["far"] = 30_000_000
        else:
            content["added_tokens"].append(
                content["added_tokens"][0] | {"content": "far", "id": 30_000_000}
            )

    change_tokenizer(model, change)
    tracemalloc.start()
    refused(model, "up to number 30000000", "none with number 288")
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()
