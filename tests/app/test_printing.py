"""All that commands print goes through one place, which makes it harmless."""

from __future__ import annotations

import ast
import http.server
import logging
import os
import shlex
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from spu_llm.app import cli, printing
from spu_llm.app.progress import Progress
from tests.kit.paths import ROOT
from tests.kit.terminal import open_terminal

EVIL = "\x1b]52;c;QQ==\x07 a\u202eb\u200bc"
SHOWN = "␛]52;c;QQ==␇ a<U+202E>b<U+200B>c"

# Files that write to a stream themselves, and why that is right.
WRITERS = {
    "spu_llm/app/printing.py": "the one place",
    "spu_llm/app/progress.py": "moves the cursor; its words are made harmless as they come",
    "experiments/common/cable.py": "tells another process numbers, as JSON in ASCII",
    "experiments/confidential/worker.py": "tells another process, as JSON in ASCII",
    "experiments/confidential/systems.py": "tells another process, as JSON in ASCII",
    "models/training/optimise.py": "numbers of the shipped models' training",
    "models/training/evaluate.py": "numbers of the shipped models' training",
    "models/training/train.py": "numbers of the shipped models' training",
    "models/training/train_t5.py": "progress of the T5 pair's training",
    "protocols/functions/fits.py": "numbers of fitted functions",
}
# What a stream may be asked for anywhere.
_HARMLESS = {"isatty", "flush", "reconfigure"}
_PRINTS = {"print", "pprint", "print_exc", "print_exception", "print_stack", "print_last"}


def writes(tree: ast.AST) -> Iterator[int]:
    """Lines that print, or hand a standard stream on."""
    fine = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _HARMLESS:
            fine.add(id(node.value))
        if isinstance(node, ast.Assign):  # another stream in its place
            fine |= {id(target) for target in node.targets}
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            fine.add(id(node.args[0]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            if name in _PRINTS:
                yield node.lineno
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            stream = node.attr.strip("_") in ("stdout", "stderr") and node.value.id == "sys"
            if stream and id(node) not in fine:
                yield node.lineno
        if isinstance(node, ast.Constant) and node.value in ("/dev/tty", "/dev/stdout"):
            yield node.lineno


def test_nothing_is_printed_elsewhere() -> None:
    collected: dict[str, list[int]] = {}
    for package in ("spu_llm", "protocols", "models", "experiments"):
        for path in (ROOT / package).rglob("*.py"):
            if lines := list(writes(ast.parse(path.read_text(encoding="utf-8")))):
                collected[path.relative_to(ROOT).as_posix()] = lines
    assert {name: collected[name] for name in collected if name not in WRITERS} == {}
    assert set(WRITERS) == set(collected)  # the walk sees, and no entry is stale


@pytest.mark.parametrize(
    "code",
    [
        "print(x)",
        "sys.stderr.write(x)",
        "out = sys.stdout",
        "traceback.print_exc()",
        "sys.__stdout__.buffer.write(x)",
        "f(file=sys.stderr)",
        "open('/dev/tty')",
    ],
)
def test_the_walk_sees_each_way_to_print(code: str) -> None:
    assert list(writes(ast.parse(code))) == [1]


def test_lines_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    printing.show(EVIL, "name\nspu-llm: a lie", "column   of a table")
    printing.tell(EVIL)
    printing.say(f"{EVIL}\nspu-llm: a lie")
    out, err = capsys.readouterr()
    assert out == f"{SHOWN}\nname␊spu-llm: a lie\ncolumn   of a table\n"
    assert err == f"{SHOWN}\nspu-llm: {SHOWN} spu-llm: a lie\n"


def test_no_work_ends_when_nobody_reads_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `serve 2>&1 | logger` when the logger dies."""
    reads, writes_ = os.pipe()
    os.close(reads)
    with open(writes_, "w") as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        printing.tell("a line", "another")
        printing.say("a third")
        with pytest.raises(OSError):
            broken.flush()  # the pipe is broken indeed
        with suppress(OSError):
            broken.close()


def test_progress_shows_no_escape_sequence_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    progress = Progress()
    progress.stage(EVIL)
    progress.update(EVIL)
    progress.close()
    shown = terminal.getvalue()
    assert SHOWN in shown and "\x1b]" not in shown and "\u202e" not in shown


def test_what_libraries_log_and_threads_raise_is_harmless(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    printing.guard()

    def fail() -> None:
        raise ValueError(EVIL)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    last = logging.lastResort
    assert last is not None
    last.handle(logging.LogRecord("grpc", logging.ERROR, "", 0, EVIL, None, None))
    err = capsys.readouterr().err
    assert err.count(SHOWN) == 2 and "Traceback" in err
    assert "\x1b" not in err and "\u202e" not in err


# ---- through commands


def end_of(*arguments: str | Path) -> object:
    with pytest.raises(SystemExit) as end:
        cli.main(list(map(str, arguments)))
    return end.value.code


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    assert end_of("watermark", "keygen", "--out", path) == 0
    return path


@pytest.fixture
def embed(key: Path) -> list[str]:
    code = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    one = {"text": " a" + %r, "ended": True}
    print(json.dumps({"sequences": [one] * asked["n"]}), flush=True)
"""
    command = shlex.join([sys.executable, "-c", code % EVIL])
    return [
        "watermark",
        "embed",
        "--key",
        str(key),
        "--command",
        command,
        "--candidates",
        "2",
        "--no-history",
    ]


def test_marked_text_cannot_reach_the_clipboard(
    embed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = open_terminal(monkeypatch)
    assert end_of(*embed) == 0
    shown = terminal.getvalue()
    assert f" a{SHOWN}" in shown and "\x1b]" not in shown and "\u202e" not in shown


def test_marked_text_is_exact_in_a_pipe(
    embed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of(*embed) == 0
    assert capsys.readouterr().out == f" a{EVIL}\n"


class Refuses(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.wfile.write(b"HTTP/1.0 400 \x1b]52;c;QQ==\x07\r\nContent-Length: 0\r\n\r\n")

    def log_message(self, *arguments: object) -> None:
        pass


def test_an_endpoint_s_reason_is_harmless(key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1/completions"
        assert (
            end_of(
                "watermark",
                "embed",
                "--key",
                key,
                "--endpoint",
                url,
                "--candidates",
                "2",
                "--no-history",
            )
            == 1
        )
        server.shutdown()
    err = capsys.readouterr().err
    assert "400" in err and "\x1b" not in err and "\x07" not in err


def test_names_of_files_are_harmless(
    tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / f"{EVIL}\nspu-llm: a lie"
    assert end_of("watermark", "keygen", "--out", other) == 0
    text = tmp_path / "text"
    text.write_text("one two three four five six seven")
    assert end_of("watermark", "detect", text, "--key", key, "--key", other) == 0
    assert end_of("watermark", "detect", tmp_path / EVIL, "--key", key) == 2
    assert end_of("watermark", "keygen", "--out", tmp_path / f"\udc9b{EVIL}") == 0
    out, err = capsys.readouterr()
    for shown in (out, err):
        assert SHOWN in shown and "\x1b" not in shown and "\u202e" not in shown
    assert "\nspu-llm: a lie" not in out


def test_values_of_a_configuration_are_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "options.toml"
    path.write_text(
        f'[generate]\nserver = "{EVIL.encode("unicode_escape").decode()}"\n'.replace(
            "\\x1b", "\\u001b"
        ).replace("\\x07", "\\u0007")
    )
    assert end_of("generate", "--config", path, "--insecure") == 2
    err = capsys.readouterr().err
    assert "--server" in err and "\x1b" not in err and "\u202e" not in err


def test_a_traceback_is_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / EVIL
    assert end_of("watermark", "keygen", "--out", path / "none", "--debug") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and SHOWN in err and "\x1b" not in err
