"""The study of the gateway under load and faults: its judgements, its tables, a minute of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.gateway import load, report
from experiments.gateway.asking import ask
from experiments.gateway.checking import Reference, jain, margin_of, percentile, slope, told_apart
from experiments.gateway.faults import FAULTS
from experiments.gateway.forwarding import Forwarder
from experiments.gateway.parties import can_mount, descendants, memory, with_template
from experiments.gateway.plan import NEAR, LoadPlan
from models.chat import Message
from models.hf import save_model
from spu_llm.app import cli
from tests.kit.models import PRIVATE, endless, save_tokenizer, tiny_params
from tests.kit.pair import Pair

PLAN = {
    "minutes": 30.0,
    "conversations": 2,
    "chats": 1,
    "at_once": 1,
    "keep": 1,
    "turns": 2,
    "answer_tokens": 4,
}


def row(number: int, **more: Any) -> dict[str, Any]:
    return {
        "conversation": number % 2,
        "chat": [0, number],
        "turn": 0,
        "streamed": True,
        "begun": 10.0 * number,
        "seconds": 5.0 + number,
        "first_text": 2.0,
        "how": "answered",
        "id": f"chatcmpl-{number}",
        "text": f"text {number}",
        "margin": 0.0,
        "counts": True,
        "cached_tokens": 0,
        **more,
    }


def sample(minute: float, mib: float) -> dict[str, Any]:
    party = {"supervisor": mib * 2**20, "unshared": 0, "workers": 5 << 20, "processes": 3}
    return {
        "at": 60 * minute,
        "answered": int(minute),
        "requests": 2,
        "gateway": party,
        "provider": party,
    }


def result(**more: Any) -> dict[str, Any]:
    return {
        "plan": PLAN,
        "rows": [row(number) for number in range(4)],
        "samples": [sample(minute, 100.0) for minute in range(31)],
        "asked": 4,
        "counted": 4,
        "left": [[], []],
        "others": 0.1,
        **more,
    }


# ---- judgements


def test_fairness_is_jains_index() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([6, 0, 0]) == pytest.approx(1 / 3)
    assert jain([0, 0]) == 0


def test_a_slope_leaves_peaks_out() -> None:
    points = [(float(x), 2.0 * x + 1) for x in range(20)]
    points[7] = (7.0, 500.0)
    assert slope(points) == pytest.approx(2)
    assert slope(points[:1]) == 0


def test_percentiles_and_pairs() -> None:
    assert percentile([1, 2, 3], 50) == 2 and percentile([1, 2], 50) == 1.5
    assert told_apart(["a", "b", "b", "c"]) == pytest.approx(1 - 2 / 12)
    assert told_apart(["a"]) == 0


WORDS = ["", "a", "ab", "b", "c"]  # the first one ends a text


def logits(tokens: list[int]) -> np.ndarray:
    """Prefer "a", then "b" by 0.05 over "c", then the end."""
    rows = [[0, 9, 0, 0, 0], [0, 0, 0, 5.05, 5.0], [4, 0, 0, 0, 0]]
    return np.array(rows[min(len(tokens) - 1, 2)], np.float32)


def decode(tokens: list[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


@pytest.mark.parametrize(
    ("text", "count", "margin", "tokens"),
    [
        ("ab", 2, 0.0, [1, 3]),
        ("ab", 3, 0.0, [1, 3, 0]),  # the end counts
        ("ac", 2, 0.05, [1, 4]),
        ("ab", 1, 9.0, [2]),  # one token, which has the same text
        ("b", 1, 9.0, [3]),
    ],
)
def test_the_margin_of_an_answer(text: str, count: int, margin: float, tokens: list[int]) -> None:
    judged = margin_of(logits, decode, {0}, [7], text, count)
    assert judged is not None
    assert judged[0] == pytest.approx(margin, abs=1e-6) and judged[1] == tokens


def test_a_text_that_no_tokens_write_has_none() -> None:
    assert margin_of(logits, decode, {0}, [7], "x", 1) is None


def test_an_answer_belongs_to_its_chat(pair: Pair, tmp_path: Path) -> None:
    """A turn that goes on in its session has the tokens that were written there."""
    reference = Reference(with_template(pair.private, tmp_path))
    rows: list[dict[str, Any]] = []
    said: list[str] = []
    tokens: list[int] = []
    for turn, words in enumerate(("hi", "so")):
        said.append(words)
        chat = [Message("assistant" if i % 2 else "user", one) for i, one in enumerate(said)]
        prompt = reference.goes_on(tokens, chat) if turn else reference.begins(chat)
        text, answer = greedy(reference, prompt, 3)
        cached = len(tokens) - 1 if turn else 0
        rows.append(
            row(0, said=list(said), text=text, tokens=3, turn=turn)
            | {"prompt_tokens": len(prompt), "cached_tokens": cached, "begun": float(turn)}
        )
        tokens = [*prompt, *answer]
        said.append(text)
    other = row(1, said=["another chat"], text=rows[0]["text"] + "!", tokens=3)
    rows.append(other | {"prompt_tokens": rows[0]["prompt_tokens"]})
    load.check(rows, reference)
    assert [one["margin"] for one in rows[:2]] == [0, 0] and all(r["counts"] for r in rows[:2])
    assert report.is_wrong(rows[2])


def greedy(reference: Reference, prompt: list[int], count: int) -> tuple[str, list[int]]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(np.argmax(reference._drafter.logits([*prompt, *tokens]))))
    return reference._format.text.tokenizer.decode(tokens), tokens


# ---- tables


def test_a_run_that_holds_has_no_failures() -> None:
    assert report.failures_of_load(result()) == []
    table = report.load_table(result())
    assert "| requests: asked, answered | 4, 4 |" in table and "criteria hold: yes" in table


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"asked": 5}, "1 requests have no end"),
        ({"counted": 3}, "1 answers are counted otherwise"),
        ({"rows": [row(0), row(1), row(2), row(3, how="broken")]}, "1 requests were not answered"),
        ({"rows": [row(0), row(1), row(2), row(3, id="chatcmpl-0")]}, "1 answers share an id"),
        ({"rows": [row(0), row(1), row(2), row(3, margin=None)]}, "1 answers are not the model's"),
        ({"rows": [row(0), row(1), row(2), row(3, counts=False)]}, "1 answers are not the model's"),
        ({"rows": [row(n) for n in (0, 2, 4, 1)]}, "fairness is 0.800"),
        ({"samples": [sample(m, 100 + m) for m in range(31)]}, "memory grows by 120.0 MiB"),
        ({"left": [[7], []]}, "1 processes outlive"),
    ],
)
def test_what_does_not_hold_is_said(more: dict[str, Any], words: str) -> None:
    failures = report.failures_of_load(result(**more))
    assert any(failure.startswith(words) for failure in failures), failures


def test_a_margin_below_the_bound_is_no_mix_up() -> None:
    near = result(rows=[row(0), row(1), row(2), row(3, margin=0.9 * NEAR)])
    assert report.failures_of_load(near) == []
    assert f"| another one, within a margin of {NEAR:g} | 1 |" in report.load_table(near)


def test_a_short_run_has_no_slope_to_hold() -> None:
    short = result(samples=[sample(m / 10, 100 + m) for m in range(31)])
    short["plan"] = {**PLAN, "minutes": 3.0}
    assert report.failures_of_load(short) == [] and "too short" in report.load_table(short)


@pytest.mark.parametrize(
    ("kind", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_a_run_is_drawn_the_same_each_time(tmp_path: Path, kind: str, begins: bytes) -> None:
    one, other = tmp_path / f"one.{kind}", tmp_path / f"other.{kind}"
    for path in (one, other):
        report.plot(result(), path)
    assert one.read_bytes().startswith(begins)
    assert one.read_bytes() == other.read_bytes()


def end(how: str, after: float = 2.0) -> dict[str, Any]:
    return {"how": how, "after": after, "status": 502, "message": "the peer has gone"}


def met(**more: Any) -> dict[str, Any]:
    one = {
        "fault": "kill -9",
        "ends": "error",
        "streamed": end("error"),
        "whole": end("error"),
        "failure": "",
        "next": {"how": "answered", "message": "", "seconds": 3.0},
        **more,
    }
    return {"rows": [one], "left": [], "left_out": []}


def test_a_fault_that_is_told_in_time_holds() -> None:
    assert report.failures_of_faults(met()) == []
    table = report.faults_table(met())
    assert "| kill -9 | 502: the peer has gone; 2.0 s |" in table
    gone = {"streamed": end("broken"), "whole": end("broken")}
    assert report.failures_of_faults(met(ends="broken", **gone)) == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"streamed": end("broken")}, "streamed: broken"),
        ({"whole": end("malformed")}, "whole: malformed"),
        ({"whole": end("error", 90.0)}, "whole: error after 90.0 s"),
        ({"next": end("error")}, "the next request: the peer has gone"),
        ({"failure": "2 workers outlive the gateway"}, "2 workers outlive"),
    ],
)
def test_a_fault_that_is_not_told_is_said(more: dict[str, Any], words: str) -> None:
    (failure,) = report.failures_of_faults(met(**more))
    assert words in failure


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


# ---- parts that meet the machine


def served(kind: str, body: str, status: int = 200) -> tuple[HTTPServer, int]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, server.server_address[1]


CHUNK = 'data: {"id": "a", "choices": [{"delta": {"content": "x"}, "finish_reason": %s}]}\n\n'
ERROR = '{"error": {"message": "the provider has gone", "type": "api_error"}}'
EVENTS = "text/event-stream"


@pytest.mark.parametrize(
    ("kind", "body", "status", "how"),
    [
        (EVENTS, CHUNK % "null" + CHUNK % '"stop"' + "data: [DONE]\n\n", 200, "answered"),
        (EVENTS, CHUNK % "null" + f"data: {ERROR}\n\n", 200, "error"),
        (EVENTS, CHUNK % "null", 200, "broken"),
        (EVENTS, CHUNK % "null" + "data: [DONE]\n\n", 200, "malformed"),
        ("application/json", ERROR, 502, "error"),
        ("application/json", "{}", 502, "malformed"),
        ("text/html", "Internal Server Error", 500, "malformed"),
    ],
)
def test_how_a_request_ends(kind: str, body: str, status: int, how: str) -> None:
    server, port = served(kind, body, status)
    reply = ask(port, [{"role": "user", "content": "hi"}], 4, stream=kind == EVENTS)
    server.shutdown()
    server.server_close()
    assert reply.how == how and (reply.status == status)


def test_nobody_there_is_a_broken_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert ask(port, [], 1, stream=True).how == "broken"


def test_a_forwarder_is_cut_and_falls_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as target:
        forwarder = Forwarder(target.getsockname()[1])
        near = socket.create_connection(("127.0.0.1", forwarder.port), timeout=5)
        far = target.accept()[0]
        near.sendall(b"a")
        assert far.recv(1) == b"a"
        forwarder.stall()
        near.sendall(b"b")
        far.settimeout(0.2)
        with pytest.raises(TimeoutError):
            far.recv(1)
        forwarder.mend()
        assert _ends(near)
        again = socket.create_connection(("127.0.0.1", forwarder.port), timeout=5)
        target.accept()[0].sendall(b"c")
        assert again.recv(1) == b"c"
        forwarder.cut()
        assert _ends(again)
        forwarder.close()


def _ends(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_memory_and_processes_are_the_kernels() -> None:
    proportional, own = memory(os.getpid())
    assert proportional >= own > 1 << 20
    with subprocess.Popen(["sh", "-c", "sleep 30 & wait"]) as shell:
        try:
            assert shell.pid in descendants(os.getpid())
        finally:
            for pid in descendants(shell.pid):
                os.kill(pid, 9)
            shell.kill()
    assert memory(shell.pid) == (0, 0)


def test_a_disk_of_its_own_is_seen_or_not(tmp_path: Path) -> None:
    assert can_mount(tmp_path) in (True, False)
    assert not list((tmp_path / "tried").iterdir())  # nothing of it is left here


def test_lines_are_short_and_each_once() -> None:
    said = load.lines()
    assert len(said) == len(set(said)) > 200 and max(map(len, said)) <= 24


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--minutes", "0"), "--minutes must be above 0"),
        (("--conversations", "0"), "--conversations must be 1 to 64"),
        (("--conversations", "30", "--chats", "30"), "must be 1 to 64"),
    ],
)
def test_options_out_of_range(
    option: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["experiment", "gateway-load", *option])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_minute_of_load_holds(tmp_path: Path) -> None:
    """Two programs ask a tiny model by a real gateway and a real provider. A fast machine comes to
    second turns, which have more tokens than the models of other tests read.
    """
    kept: list[dict[str, Any]] = []
    plan = LoadPlan(0.4, 2, 1, 2, 1, 2, 2)
    plain, config = tmp_path / "plain", replace(PRIVATE, n_positions=256)
    plain.mkdir()
    save_model(plain, config, endless(tiny_params(config, 1)))
    save_tokenizer(plain)
    model = with_template(plain, tmp_path)
    run = load.run(plan, model, tmp_path, lambda words: None, kept.append)
    assert report.failures_of_load(json.loads(json.dumps(run))) == []
    assert len(run["rows"]) >= 2 and kept
