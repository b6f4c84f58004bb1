"""What a person sees and what scripts read: progress, streamed text, summary, the JSON file."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from spu_llm.api.completion import BothWays, Completion, Prefetched, Seconds, StepCost
from spu_llm.api.events import event_of
from spu_llm.app import progress
from spu_llm.app.output import write_json
from spu_llm.app.screen import Screen, Stages
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.net.relay import Relay
from tests.kit.paths import ROOT
from tests.kit.patience import eventually
from tests.kit.terminal import open_terminal

RESULT = Completion(
    text="f(x):",
    token_ids=[1, 2, 3],
    finish_reason="length",
    steps=1,
    drafted=2,
    accepted=1,
    seconds=Seconds(4.0, 1.0, 2.0),
    made_beside=Prefetched(0, 0.0),
    first_token_seconds=5.5,
    elapsed_seconds=9.0,
    bytes={"offline": BothWays(5_000_000, 1_000_000), "online": BothWays(2_000_000, 3_000_000)},
    messages={"online": 1007},
    wire_bytes=BothWays(7_500_000, 4_600_000),
    per_step=[StepCost(2.0, 5_000_000, 900, 0.5, 10, 1)],
    learned={"client": ["emitted tokens"], "provider": ["draft length: 2"]},
    machine=machine(),
    config={},
)


class Counters:
    wire_bytes_sent = 1_000_000
    wire_bytes_received = 500_000


class FakeRelay:
    def snapshot(self) -> Counters:
        return Counters()


RELAY = cast(Relay, FakeRelay())


def run(screen: Stages, *events: dict[str, Any]) -> None:
    for event in events:
        if (typed := event_of(event, RELAY)) is not None:
            screen.on_event(typed)


def stage(name: str) -> dict[str, Any]:
    return {"event": "stage", "name": name}


def text(value: str) -> dict[str, Any]:
    return {"event": "text", "text": value}


STEP = {"event": "step", "steps": 1, "accepted": 1, "drafted": 2}


def test_piped_output_is_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen("def ")
    run(screen, stage("preparing"), text("f(x"), STEP, text("):\x1b[31m"))
    screen.finish()
    screen.close()
    screen.summary(RESULT)
    out, err = capsys.readouterr()
    assert out == "def f(x):\x1b[31m\n"
    assert "\r" not in err and "\x1b" not in err
    assert err.splitlines() == [
        "[starting: 0 s]",
        "[preparing: 0 s, 1.5 MB on the wire]",
        "client learned:",
        "  - emitted tokens",
        "provider learned:",
        "  - draft length: 2",
        "3 tokens, ended by length; 1 secure steps, 2.00 tokens a step, "
        "1 of 2 drafts accepted (50%)",
        "first token: after 5.5 s, set-up and preprocessing included (prefill alone 1.0 s)",
        "online: 1.00 tokens/s, 2.0 s of decoding",
        "everything included: 9.0 s, 4.0 s of them offline; 3.00 s per token",
        "payload: online 5.0 MB in 1,007 messages (client sent 2.0 MB, provider 3.0 MB), "
        "offline 6.0 MB",
        "on the wire: 12.1 MB (client sent 7.5 MB, provider 4.6 MB)",
    ]


def test_a_completion_without_text_shows_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen("def ")
    run(screen, stage("preparing"), STEP)
    screen.finish()
    screen.close()
    screen.summary(replace(RESULT, token_ids=[], steps=0, drafted=0, accepted=0))
    out, err = capsys.readouterr()
    assert out == "def \n"
    lines = err.splitlines()
    at = lines.index("0 tokens, ended by length")
    assert lines[at + 1] == "everything included: 9.0 s, 4.0 s of them offline"


def test_a_failure_before_any_text_leaves_stdout_empty(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen("def ")
    run(screen, stage("preparing"))
    screen.close()
    assert capsys.readouterr().out == ""


def test_a_failure_ends_the_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen("def ")
    run(screen, text("f"))
    screen.close()
    assert capsys.readouterr().out == "def f\n"


def test_a_quiet_stage_is_repeated_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_INTERVAL_S", 0.2)
    screen = Screen("")
    run(screen, STEP)
    shown = Shown(capsys)
    assert eventually(lambda: "[decoding, 1 steps, 1 of 2 drafts accepted: " in shown.now())
    screen.close()


class Shown:
    """All that came to stderr so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._text = capsys, ""

    def now(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


def making(made: int, total: int) -> dict[str, Any]:
    return {"event": "making", "made": made, "total": total}


def test_making_says_how_far_it_is_and_what_is_to_come(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_INTERVAL_S", 0.2)
    stages = Stages()
    run(stages, making(0, 40))
    stages._making_since -= 1000.0
    run(stages, making(10, 40))
    shown = Shown(capsys)
    assert eventually(lambda: "10 of 40 batches" in shown.now())
    run(stages, making(40, 40))
    stages.close()
    lines = shown.now().splitlines()
    assert lines[1].startswith("[making correlated randomness, 0 of 40 batches: ")
    assert lines[2].startswith(
        "[making correlated randomness, 10 of 40 batches, about 3000 s to go: "
    )


def test_stages_may_be_for_terminals_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = Stages(lines=False)
    run(stages, stage("preparing"))
    run(stages, {"event": "note", "text": "no room for hints"})
    stages.close()
    assert capsys.readouterr().err == "spu-llm: no room for hints\n"
    terminal = open_terminal(monkeypatch)
    stages = Stages(lines=False)
    run(stages, stage("preparing"))
    assert visible(terminal.getvalue()) == ["[preparing: 0 s, 1.5 MB on the wire]"]
    stages.close()


def visible(output: str) -> list[str]:
    """Return the lines a terminal shows after `output`; only what the progress line uses."""
    lines, saved, i = [""], (0, 0), 0
    row = column = 0
    while i < len(output):
        c = output[i]
        i += 1
        if c == "\x1b":
            code = output[i]
            i += 1
            if code == "[":
                code = output[i]
                i += 1
                lines[row] = lines[row][:column]
                if code == "J":
                    del lines[row + 1 :]
                else:
                    assert code == "K"
            elif code == "D":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif code == "M":
                row -= 1
            elif code == "7":
                saved = row, column
            else:
                assert code == "8"
                row, column = saved
        elif c == "\r":
            column = 0
        elif c == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + c + lines[row][column + 1 :]
            column += 1
    return lines


def test_on_a_terminal_progress_gives_way_to_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    screen = Screen("def ")
    run(screen, stage("preparing"))
    assert visible(terminal.getvalue()) == ["[preparing: 0 s, 1.5 MB on the wire]"]
    run(screen, text("f(x"), STEP)
    assert eventually(lambda: "[decoding" in terminal.getvalue())
    shown = visible(terminal.getvalue())
    assert shown[0] == "def f(x"
    assert shown[1].startswith("[decoding, 1 steps, 1 of 2 drafts accepted: ")
    assert len(shown[1]) < 60
    run(screen, text("):\n  pass"))
    assert visible(terminal.getvalue()) == ["def f(x):", "  pass"]
    run(screen, STEP)
    assert eventually(lambda: len(visible(terminal.getvalue())) > 2)
    screen.finish()
    screen.close()
    screen.summary(RESULT)
    shown = visible(terminal.getvalue())
    assert shown[:3] == ["def f(x):", "  pass", "client learned:"]


def test_the_model_cannot_send_escape_sequences_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = open_terminal(monkeypatch)
    screen = Screen("")
    run(screen, text("a\x1b]0;title\x07\x9b31m\tb\nc\x7f"))
    screen.close()
    shown = terminal.getvalue().rpartition("\x1b[K")[2]
    assert shown == "a␛]0;title␇<U+009B>31m\tb\nc␡\n"


# ---- the JSON file


def test_json_is_whole_and_its_owner_s(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    path.chmod(0o644)
    write_json(path, {"text": "é\n😀\u2028"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"text": "é\n😀\u2028"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_json(link, {})
    assert link.is_symlink() and target.read_text() == "{}\n"


def test_a_result_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(path, {"text": object()})
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_replaced_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(InputError, match="--json.*result.json: No space left"):
        write_json(tmp_path / "result.json", {})
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json(pipe, {"steps": 1})
        assert json.loads(os.read(reader, 1000)) == {"steps": 1}
        assert stat.S_ISFIFO(pipe.stat().st_mode)
    finally:
        os.close(reader)


def test_standard_output_is_not_replaced(tmp_path: Path) -> None:
    """`--json /dev/stdout > file` adds to the file that the text went to."""
    output = tmp_path / "output"
    code = "import sys; from spu_llm.app.output import *; print('text', flush=True); "
    code += "write_json(Path('/dev/stdout'), {})"
    with output.open("w") as stdout:
        subprocess.run([sys.executable, "-c", code], stdout=stdout, cwd=ROOT, check=True)
    assert output.read_text() == "text\n{}\n"


def test_names_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"config": {"draft_model": "caf\udce9"}})
    assert json.loads(path.read_text()) == {"config": {"draft_model": "caf\udce9"}}
