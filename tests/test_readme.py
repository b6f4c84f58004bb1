"""What README and docs tell a reader to type, open or read is there, and figures are measured."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from experiments import headline, render
from experiments.common import saved
from spu_llm.app import cli
from spu_llm.app.reference import reference
from tests.experiments.headline_results import committed, study
from tests.kit.pages import DOCUMENTS, TEXTS
from tests.kit.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(
    block
    for text in map(TEXTS.__getitem__, DOCUMENTS)
    for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
)
COMMANDS = sorted({line.split("#")[0].strip() for line in BLOCKS.splitlines()})
MOST_LINES = 150  # of the README


def heading_anchor(heading: str) -> str:
    """Return a heading's anchor as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("spu-llm ")])
def test_commands_are_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompt.txt").write_text("class Reader:\n", encoding="utf-8")
    options = cli.command_line().parse_args(shlex.split(command)[1:])
    assert callable(options.run)


def test_make_targets_and_modules_are_there() -> None:
    targets = re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"demo", "test"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    (arguments,) = re.findall(r"make demo ARGS='(.*?)'", README)
    assert cli.command_line().parse_args(["demo", *shlex.split(arguments)]).network == "lan"
    (arguments,) = re.findall(r"make chat ARGS='(.*?)'", README)
    assert cli.command_line().parse_args(["chat", "--model", "m", *shlex.split(arguments)]).standard
    modules = re.findall(r"^python -m (\S+)", BLOCKS, re.MULTILINE)
    assert len(modules) >= 2 and all(map(importlib.util.find_spec, modules))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[path]):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in map(heading_anchor, headings), link


def test_every_page_is_reached_from_the_readme() -> None:
    """In one step, so that whoever reads the README knows what there is."""
    assert README.count("\n") <= MOST_LINES
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README)}
    assert {str(path.relative_to(ROOT)) for path in DOCUMENTS[1:]} <= links


def test_the_list_of_commands_is_that_of_the_command_line() -> None:
    """Else: python -m spu_llm.app.reference > docs/reference/commands.md"""
    assert reference() == (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")


def test_files_that_the_glossary_names_are_there() -> None:
    text = (ROOT / "docs" / "explanation" / "glossary.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:spu_llm|protocols|models)/[\w./]+)`", text)
    assert len(paths) > 20 and all((ROOT / path).exists() for path in paths)


def test_what_the_demo_takes_is_what_it_took() -> None:
    demo = saved.load("demo")
    online, offline = (sum(demo["bytes"][kind].values()) / 1e6 for kind in ("online", "offline"))
    text = " ".join(README.split())
    assert (
        f"Its {len(demo['token_ids'])} tokens take {online:.0f} MB online and "
        f"{round(offline, -1):.0f} MB ahead of time" in text
    )
    assert re.fullmatch(r"[0-9a-f]{7}", demo["machine"]["commit"])  # of a clean checkout


BEGIN, END = (mark.format("headline") for mark in (render.BEGIN, render.END))


def test_the_headline_is_that_of_the_committed_study() -> None:
    assert render.with_headline(README) == README
    said = README.split(BEGIN)[1].split(END)[0]
    data, name = render.main_study()
    seconds = headline.headline(data, timed=True).splitlines()[-1]
    assert ("s a token online" in said) == saved.timed(name) == (seconds in said)
    assert saved.load("index")[name]["command"] in " ".join(said.split())


def test_the_headline_follows_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    index = {"completions": {"command": "spu-llm", "quiet": True}}
    results = {"completions": study(), "index": index}
    monkeypatch.setattr(saved, "load", results.__getitem__)
    changed = render.with_headline(README)
    assert "**0.344 s a token online on an emulated LAN**" in changed
    assert "All of it from `spu-llm`.\n" in changed and "upper bounds" not in changed
    # All the rest stays.
    for before, after in zip(README.split(BEGIN), changed.split(BEGIN), strict=True):
        assert before.split(END)[-1] == after.split(END)[-1]


def test_the_headline_is_of_the_file_of_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "load", committed().__getitem__)
    changed = render.with_headline(README)
    assert "**0.344 s a token online on an emulated LAN**" in changed
    assert "All but the hint from `spu-llm completions_lan`.\n" in changed
    assert "a client fetches a hint of the model, 2 MB, which" in changed  # of any run
