"""What the built wheel holds and says of itself, and that it works where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.kit.paths import ROOT
from tests.kit.patience import RUN_S

PACKAGES = ("spu_llm", "protocols", "models", "experiments")


def built(source: Path, what: str) -> Path:
    """Return the `wheel` or `sdist` that a source tree makes."""
    code = f"from setuptools import build_meta; build_meta.build_{what}('dist/{what}')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (file,) = (source / "dist" / what).iterdir()
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what the wheel is made of."""
    copy = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(built(source, "wheel"))


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


def contents(wheel: zipfile.ZipFile) -> dict[str, int]:
    """Return checksums by name, but of the list of these."""
    return {
        one.filename: one.CRC for one in wheel.infolist() if not one.filename.endswith("/RECORD")
    }


@pytest.mark.slow
def test_the_source_distribution_makes_the_same_wheel(
    source: Path, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(source, whole, ignore=shutil.ignore_patterns("build", "dist", "*.egg-info"))
    for name in ("Makefile", "requirements.lock", "CITATION.cff"):
        shutil.copy(ROOT / name, whole / name)
    for name in ("deploy", "scripts"):
        shutil.copytree(ROOT / name, whole / name, ignore=shutil.ignore_patterns("__pycache__"))
    with tarfile.open(built(whole, "sdist")) as packed:
        packed.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert (unpacked / "deploy" / "compose.yaml").exists()
    assert contents(zipfile.ZipFile(built(unpacked, "wheel"))) == contents(wheel)


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` of an environment with the wheel. Other packages are this one's: a path in a
    `.pth` file is not searched for further such files, so not for that of an editable installation.
    """
    place = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    offline = ["install", "--quiet", "--no-index", "--no-deps", str(wheel.filename)]
    subprocess.run([*pip, *offline], check=True, cwd=place)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin"


def run(program: Path, *words: str, cwd: Path) -> str:
    """Return what a program of the environment prints, run where no sources are."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(program), *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_wheel_is_what_is_imported(installed: Path, tmp_path: Path) -> None:
    code = f"""
import importlib
from importlib.metadata import distribution
from importlib.resources import files
for name in {PACKAGES}:
    print(importlib.import_module(name).__file__)
print(distribution("spu-llm").locate_file(""))
assert "<title>" in files("spu_llm.gateway.page").joinpath("chat.html").read_text()
"""
    lines = run(installed / "python", "-c", code, cwd=tmp_path).splitlines()
    assert len(lines) == 5 and all(line.startswith(str(installed.parent)) for line in lines), lines


@pytest.mark.slow
def test_an_installed_wheel_completes_a_prompt(installed: Path, tmp_path: Path) -> None:
    program = installed / "spu-llm"
    assert "packages: spu" in run(program, "doctor", cwd=tmp_path)
    assert "--token-file" in run(program, "gateway", "--help", cwd=tmp_path)
    said = run(program, "demo", "--max-new-tokens", "2", "--standard", cwd=tmp_path)
    assert said.startswith("def read_config(path):")
