"""Imports run one way between rooms (CONTRIBUTING.md, "Where things are")."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

PACKAGES = ("spu_llm", "protocols", "models", "experiments")

# Each room may import itself and what is named here. A room is a folder below a package, or what
# lies in the package's own folder.
CORE = ["spu_llm.core"]
PARTY = [*CORE, "spu_llm.compiler", "spu_llm.offline", "spu_llm.runtime"]
PROTOCOLS = ["protocols.bits", "protocols.ot", "protocols.arithmetic", "protocols.functions"]
PROTOCOLS = [*PROTOCOLS, "protocols.verification"]
SYSTEM = [*PARTY, *PROTOCOLS, "protocols.dp", "models"]
# The version of all protocols lies in their package's own folder.
OF_SYSTEMS = ["decoding", "confidential", "dp_text", "split", "watermark"]
SYSTEMS = [f"spu_llm.systems.{name}" for name in OF_SYSTEMS]
SERVICE = [*SYSTEM, "protocols", "spu_llm.net", "spu_llm.systems"]
API = [*SERVICE, *SYSTEMS, "spu_llm.service", "spu_llm.vault"]
ATTACKS = [*API, "spu_llm.api", "models.training"]
CLUSTER = [*API, "spu_llm.api"]
APP = [
    *ATTACKS,
    "spu_llm.attacks",
    "spu_llm.cluster",
    "spu_llm.gateway",
    "models.alignment",
    "models.importing",
]
STUDY = [*APP, "spu_llm.app", "experiments.common"]
ALLOWED: dict[str, list[str]] = {
    "spu_llm.core": [],
    "spu_llm.compiler": CORE,
    "spu_llm.offline": [*CORE, "spu_llm.compiler"],
    "spu_llm.runtime": [*CORE, "spu_llm.compiler", "spu_llm.offline"],
    "spu_llm.testing": CORE,
    "spu_llm.net": CORE,
    "protocols.bits": CORE,
    "protocols.ot": [*CORE, "protocols.bits"],
    "protocols.arithmetic": [*CORE, "spu_llm.offline", "protocols.bits"],
    "protocols.functions": [*CORE, "protocols.bits", "protocols.ot", "protocols.arithmetic"],
    "protocols.verification": [*CORE, *PROTOCOLS],
    "protocols.dp": [*CORE, *PROTOCOLS],
    "models": [*CORE, *PROTOCOLS],
    "models.training": [*CORE, *PROTOCOLS, "models"],
    "models.alignment": [*CORE, "models", "models.training"],
    "models.importing": [*CORE, "models"],
    "spu_llm.systems": SYSTEM,
    "spu_llm.systems.decoding": [*SYSTEM, "spu_llm.systems"],
    "spu_llm.systems.confidential": [*SYSTEM, "spu_llm.systems"],
    "spu_llm.systems.dp_text": [*SYSTEM, "spu_llm.systems", "spu_llm.systems.decoding"],
    "spu_llm.systems.split": [*SYSTEM, "spu_llm.systems", "spu_llm.systems.decoding"],
    "spu_llm.systems.watermark": [*SYSTEM, "spu_llm.systems", "spu_llm.systems.decoding"],
    "spu_llm.service": SERVICE,
    "spu_llm.vault": [*SERVICE, "spu_llm.service", "spu_llm.systems.confidential"],
    "spu_llm.api": API,
    "spu_llm.gateway": [*API, "spu_llm.api"],
    "spu_llm.cluster": CLUSTER,
    "spu_llm.attacks": ATTACKS,
    "spu_llm.app": APP,
    "experiments.common": STUDY,
    "experiments.spu_baseline": STUDY,
    "experiments.benchmarks": [*STUDY, "experiments.spu_baseline"],
    "experiments.cost_model": [*STUDY, "experiments.spu_baseline", "experiments.benchmarks"],
}
MEASURED = [*STUDY, "experiments.spu_baseline", "experiments.benchmarks", "experiments.cost_model"]
# "spu_llm.testing": a dealer of correlated randomness.
ALLOWED |= {
    "experiments.fidelity": [*MEASURED, "spu_llm.testing"],
    "experiments.completions": [*MEASURED, "experiments.fidelity"],
    "experiments.confidential": MEASURED,
    "experiments.dp_text": MEASURED,
    "experiments.gateway": [*MEASURED, "experiments.fidelity"],
    "experiments.split": MEASURED,
    "experiments.watermark": MEASURED,
}
STUDIES = [room for room in ALLOWED if room.startswith("experiments.")]
# The package's own files: `python -m spu_llm`, `python -m experiments.render`, nothing in others.
ALLOWED |= {
    "spu_llm": [
        "spu_llm.api",
        "spu_llm.app",
        "spu_llm.core",
        "spu_llm.runtime",
        "spu_llm.vault",
        "models",
    ],
    "protocols": [],
    "experiments": [*STUDY, *STUDIES],
}
# Name studies, which are imported when they are asked for; nothing else of the framework does.
REGISTERS = ("spu_llm/app/studies.py", "spu_llm/service/programs.py")


def modules() -> dict[str, Path]:
    """Return all of ours by their dotted names."""
    collected = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            collected[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return collected


def room_of(module: str, known: dict[str, Path]) -> str:
    """Return the folder of a module, two levels deep; three where systems lie."""
    parts = module.split(".")
    if known[module].name != "__init__.py":
        parts = parts[:-1]
    return ".".join(parts[: 3 if parts[:2] == ["spu_llm", "systems"] else 2])


def imports_of(path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int, bool]]:
    """Modules of ours that a file imports, and studies that it names in a text (there something may
    follow a colon): which, the line, whether in a text.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if name in known and name.startswith("experiments."):
                yield name, node.lineno, True
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, f"{path}: a relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in full]
        for name in names:
            if name in known:
                yield name, node.lineno, False  # type: ignore[attr-defined]


def test_imports_run_one_way() -> None:
    known, wrong, seen = modules(), [], set()
    for module, path in known.items():
        room = room_of(module, known)
        for target, line, in_text in imports_of(path, known):
            other, place = room_of(target, known), str(path.relative_to(ROOT))
            lazily = place in REGISTERS and in_text
            if other != room and other not in ALLOWED[room] and not lazily:
                wrong.append(f"{place}:{line}: {room} imports {target}")
            seen.add((room, other))
    assert not wrong, "\n".join(wrong)
    # The test sees imports at all.
    assert {("spu_llm.offline", "spu_llm.core"), ("spu_llm.app", "experiments.watermark")} <= seen


def test_rooms_have_no_cycles() -> None:
    def reached(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"{' -> '.join((*path, room))}"
        for other in ALLOWED[room]:
            if other != room:
                reached(other, (*path, room))

    for room in ("experiments", "spu_llm.testing"):
        reached(room, ())


def test_files_have_no_circles() -> None:
    """Imports within functions count, too; names in texts, which registers have, do not."""
    known = modules()
    graph = {
        module: {
            target
            for target, _, in_text in imports_of(path, known)
            if not in_text and target != module
        }
        for module, path in known.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the files of a circle
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


def test_no_test_module_imports_another() -> None:
    """What several need is in `tests/kit`, or beside them under a name of its own."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if re.match(r"tests\.(\w+\.)*test_", name)], path


def test_names_of_tests_are_short() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert len(node.name) < 60, f"{path}: {node.name}"


def test_pytest_is_told_of_every_folder() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    told = set(re.findall(r'^    "tests/(\w+)",$', text, re.MULTILINE))
    folders = {
        path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert told == {name for name in folders if "." not in name}
