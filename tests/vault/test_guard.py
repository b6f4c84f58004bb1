"""`spu-llm vault guard`: what leaves a vault stays within its bounds, and text comes through."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.vault.guard import CHUNK_BYTES, Allowance, Spent
from tests.kit.command_line import refused
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import Command, Start
from tests.vault.commands import engine, vault

TAKES = st.lists(st.tuples(st.integers(1, CHUNK_BYTES), st.floats(0, 5)), max_size=40)


@given(TAKES, st.integers(1, 5000), st.integers(CHUNK_BYTES, 20_000))
def test_no_more_leaves_than_the_bucket_has(
    takes: list[tuple[int, float]], rate: int, burst: int
) -> None:
    """By the time that each piece may leave, burst and rate allow all up to it; a piece that could
    have left earlier does not wait.
    """
    allowance, now, sent, ready = Allowance(rate, burst), 100.0, 0, 0.0
    for size, pause in takes:
        now = max(now + pause, ready)
        sent += size
        ready = now + allowance.take(size, now)
        assert sent <= burst + rate * (ready - 100.0) + 1e-6 * sent
        assert allowance.sent == sent
        if sent <= burst:
            assert ready == now


def test_what_is_spent_takes_nothing_more() -> None:
    allowance = Allowance(10.0, 2000, 2500)
    assert allowance.take(1000, 0.0) == allowance.take(1000, 0.0) == 0.0
    with pytest.raises(Spent):
        allowance.take(501, 1e9)
    assert allowance.take(500, 1e9) == 0.0 and allowance.sent == 2500


def guard(start: Start, port: int, *options: str) -> tuple[Command, int]:
    there, here = f"127.0.0.1:{port}", "127.0.0.1:0"
    command = start("vault", "guard", "--vault", there, "--listen", here, *options)
    return command, command.until_listening()


def test_text_comes_through(start: Start, pair: Pair) -> None:
    served = engine(start, pair.private, "--insecure")
    kept = vault(start, served.port, "--insecure")
    watching, port = guard(start, kept.port, "--model", str(pair.private))
    asked = start(
        *("vault", "generate", "--vault", f"127.0.0.1:{port}", "--insecure"),
        *("--tokenizer", str(pair.private), "--temperature", "0", "--max-new-tokens", "6"),
    )
    assert asked.wait(RUN_S) == 0, asked.stderr
    assert eventually(lambda: "bytes have gone out" in watching.stderr, END_S)
    assert " days" in watching.stderr


def leaky(served: socket.socket) -> None:
    """Be a vault that says all it can to whoever comes."""
    while True:
        try:
            caller = served.accept()[0]
        except OSError:
            return
        with closing(caller):
            try:
                while True:
                    caller.sendall(bytes(1 << 16))
            except OSError:
                pass


def test_a_vault_that_says_all_it_can_is_held(start: Start) -> None:
    """Over two connections together; at `most` bytes both end, and further ones get nothing."""
    rate, burst, most = 2000, 4096, 14_000
    with closing(socket.create_server(("127.0.0.1", 0))) as served:
        threading.Thread(target=leaky, args=(served,), daemon=True).start()
        bounds = ("--rate", str(rate), "--burst", str(burst), "--most", str(most))
        watching, port = guard(start, served.getsockname()[1], *bounds)
        began, got = time.monotonic(), 0
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), RUN_S) as user:
                for _ in range(4):
                    got += len(user.recv(CHUNK_BYTES, socket.MSG_WAITALL))
                    assert got <= burst + rate * (time.monotonic() - began)
        with socket.create_connection(("127.0.0.1", port), RUN_S) as user:
            while data := user.recv(CHUNK_BYTES):
                got += len(data)
        # What was read of the vault, and not passed on, is charged too.
        assert most - 9 * CHUNK_BYTES <= got <= most
        assert time.monotonic() - began >= (got - burst) / rate
        with socket.create_connection(("127.0.0.1", port), RUN_S) as user:
            assert user.recv(1) == b""
        assert eventually(lambda: "no more may" in watching.stderr, END_S)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rate", "0"], "--rate must be 1 or more"),
        (["--burst", "5"], "--burst must be 1024 or more"),
        (["--most", "0"], "--most must be 1024 or more"),
        (["--model", "nowhere"], "nowhere"),
        (["--vault", "here"], "--vault"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    place = ["--vault", "127.0.0.1:1", "--listen", "127.0.0.1:0"]
    assert words in refused(capsys, "vault", "guard", *place, *options)
