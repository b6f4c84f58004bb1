"""Pages of the documentation."""

from __future__ import annotations

from experiments import render
from tests.kit.paths import ROOT

PAGES = ["README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"]


RESULTS = render.pages()


DOCUMENTS = [
    *(ROOT / page for page in PAGES),
    *sorted(set((ROOT / "docs").rglob("*.md")) - set(RESULTS)),
]


TEXTS = {path: path.read_text(encoding="utf-8") for path in [*DOCUMENTS, *RESULTS]}
