"""What the built wheel holds and says of itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.kit.paths import ROOT

PACKAGES = ("spu_llm", "protocols", "models", "experiments")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (file,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_names_its_licences_and_holds_them(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(metadata).decode().splitlines()
    assert "License-Expression: Apache-2.0" in lines
    folder = metadata.removesuffix("METADATA") + "licenses/"
    apache = wheel.read(folder + "LICENSE").decode()
    assert "Apache License" in apache and "END OF TERMS AND CONDITIONS" in apache
    python = wheel.read(folder + "models/shipped/LICENSE.python.txt").decode()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in python


def test_the_wheel_holds_what_the_repository_shows(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    wanted = [
        path
        for folder in (
            "models/shipped",
            "spu_llm/gateway/page",
            "experiments/data",
            "experiments/figures",
            "experiments/notebooks",
        )
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".pyc"
    ]
    assert ROOT / "models" / "shipped" / "README.md" in wanted
    assert {path.relative_to(ROOT).as_posix() for path in wanted} <= names
