"""`spu-llm prepare --watch`: a stock that is kept filled."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spu_llm.api.preparation import NoRoom
from spu_llm.app.keeping import AWAY_MOST_S, LOOK_S, keep
from spu_llm.core.errors import InputError, PeerError, StalledError, WorkerError
from spu_llm.offline import stock
from spu_llm.offline.access import take_lock
from spu_llm.offline.files import IN_USE
from tests.kit.dealing import TRIPLE
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.pools import PEER, session, use_up
from tests.kit.processes import Command, Start

NEEDED = 40  # units; three batches have 48
MORE = "the stock no longer lasts for all steps: making more"
STOPS = "making stops for now: a completion wants the client's pool directory"
AWAY = "nothing can be made now, trying again: "


class Ended(Exception):
    """The test has seen enough."""


class Watched:
    """`keep` on a pool of the test's own, pause by pause."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self.pauses: list[float] = []
        self.made = 0  # attempts
        self.fails: Callable[[], None] = lambda: None

    def make(self, look: Callable[[], None]) -> dict[str, Any]:
        """Stand in for `Client.prepare`."""
        self.made += 1
        self.fails()
        look()
        with session(self.directory, PEER) as pool:
            before = pool.available(TRIPLE)
            pool.prepare(TRIPLE, NEEDED)
            made = pool.available(TRIPLE) - before
        row = {"kind": TRIPLE.name, "needed_units": NEEDED, "made_units": made}
        return {
            "steps": 3,
            "tokens": {"least": 4, "most": 4},
            "correlations": [row],
            "lacking_bytes": 0,
            "seconds": {"offline": 1.0},
            "bytes": {"offline": {"client_to_provider": 0, "provider_to_client": 0}},
            "config": {"pool": str(self.directory), "peer": PEER, "request.prompt_tokens": 5},
        }

    def use(self, units: int) -> None:
        use_up(self.directory, units)

    def fail_with(self, error: Exception | None) -> None:
        def fails() -> None:
            if error is not None:
                raise error

        self.fails = fails

    def run(self, *acts: Callable[[], Any]) -> None:
        """Do in each pause what the test says; end in the pause after the last one."""
        coming = iter(acts)

        def pause(seconds: float) -> None:
            self.pauses.append(seconds)
            act = next(coming, None)
            if act is None:
                raise Ended
            act()

        with pytest.raises(Ended):
            keep(self.directory, self.make, self.lines.append, pause)

    @property
    def units(self) -> int:
        (kind,) = stock.kinds_in(self.directory / PEER)
        return kind.units


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "pool")


def nothing() -> None:
    """Do nothing in a pause."""


def test_what_a_completion_has_used_is_made_again(watched: Watched) -> None:
    watched.run(nothing, lambda: watched.use(8), nothing, lambda: watched.use(1), nothing)
    # 48 units lasted until there were 39.
    assert watched.made == 2 and watched.units == 39 + 16
    first, more, second = watched.lines
    assert first.startswith("made correlated randomness in 1.0 s ") and "4 tokens" in first
    assert more == MORE and second == first
    assert set(watched.pauses) == {LOOK_S}


def test_what_is_there_is_not_made(watched: Watched) -> None:
    with session(watched.directory, PEER) as pool:
        pool.prepare(TRIPLE, NEEDED)
    watched.run(nothing, nothing)
    (line,) = watched.lines
    assert watched.made == 1 and line.startswith("made nothing: enough for ")


def test_a_folder_that_was_removed_is_filled_again(watched: Watched) -> None:
    watched.run(lambda: (watched.directory / PEER).rename(watched.directory / "away"), nothing)
    assert watched.made == 2 and watched.units == 48


def test_a_session_in_the_directory_is_waited_for_quietly(watched: Watched) -> None:
    held = session(watched.directory, PEER)
    pool = held.__enter__()
    pool.prepare(TRIPLE, 48)

    def others_take() -> None:
        assert watched.lines == [] and watched.made == 0
        pool.take(TRIPLE, 48)

    watched.run(nothing, others_take, lambda: held.__exit__(None, None, None), nothing)
    assert watched.made == 1 and watched.units == 48
    assert len(watched.lines) == 1 and set(watched.pauses) == {LOOK_S}


def test_a_session_that_begins_first_is_waited_for(watched: Watched) -> None:
    watched.fail_with(WorkerError(f"{watched.directory / PEER} {IN_USE}"))
    watched.run(nothing, lambda: watched.fail_with(None), nothing)
    assert watched.made == 3 and len(watched.lines) == 1 and set(watched.pauses) == {LOOK_S}


def test_a_completion_that_begins_meanwhile_goes_first(watched: Watched) -> None:
    lock = -1

    def begins() -> None:
        nonlocal lock
        taken = take_lock(watched.directory / "wanted", shared=True)
        assert taken is not None
        lock = taken

    def ends() -> None:
        os.close(lock)
        watched.fails = lambda: None

    watched.fails = begins
    watched.run(nothing, nothing, ends, nothing)
    stops, made = watched.lines
    assert stops == STOPS and made.startswith("made correlated randomness")
    assert watched.made == 2 and set(watched.pauses) == {LOOK_S}


@pytest.mark.parametrize("error", [PeerError, StalledError])
def test_a_provider_that_is_away_is_told_once(watched: Watched, error: type[Exception]) -> None:
    def away() -> None:
        watched.use(20)
        watched.fail_with(error("refused"))

    def back() -> None:
        watched.fail_with(None)

    watched.run(away, *[nothing] * 6, back, away, nothing)
    grown = [LOOK_S, 2 * LOOK_S, 4 * LOOK_S, 8 * LOOK_S, AWAY_MOST_S, AWAY_MOST_S, AWAY_MOST_S]
    assert watched.pauses == [LOOK_S, *grown, LOOK_S, LOOK_S, 2 * LOOK_S]
    made = watched.lines[0]
    assert watched.lines == [made, MORE, f"{AWAY}refused", made, MORE, f"{AWAY}refused"]


def test_a_provider_may_be_away_at_first(watched: Watched) -> None:
    watched.fail_with(PeerError("refused"))
    watched.run(nothing, lambda: watched.fail_with(None), nothing)
    assert watched.lines[0] == f"{AWAY}refused" and watched.lines[1].startswith(
        "made correlated randomness"
    )
    assert len(watched.lines) == 2


@pytest.mark.parametrize("error", [InputError, WorkerError, NoRoom])
def test_other_errors_end_it(watched: Watched, error: type[Exception]) -> None:
    watched.fail_with(error("wrong"))
    with pytest.raises(error, match="wrong"):
        watched.run(nothing)
    assert watched.lines == []


def test_a_full_disk_is_told_until_the_stock_changes(watched: Watched) -> None:
    """Half-used batches may take the room; once a completion has used them up, there is some."""

    def full() -> None:
        watched.use(20)
        watched.fail_with(NoRoom("no room"))

    def used_up() -> None:
        watched.use(20)
        watched.fail_with(None)

    watched.run(full, nothing, nothing, used_up, nothing)
    made = watched.lines[0]
    assert watched.lines == [made, MORE, "no room", MORE, made] and watched.made == 3


# ---- processes, with a stub in the workers (`stub/stub_program.py`)

REQUEST = ["--standard", "--steps", "3", "--prompt", "def read("]
QUICKLY = {"SPU_LLM_LOOK_S": "0.2"}


def lines_of(command: Command) -> list[str]:
    """Return what it said, without dates and times."""
    return [line.split(" ", 2)[2] for line in command.stdout.splitlines()]


def said(command: Command, count: int, words: str) -> None:
    """Wait for the line number `count` (of all), which has `words`."""
    there = eventually(lambda: command.stdout.count("\n") >= count, RUN_S)
    assert there, command.stdout + command.stderr
    assert words in lines_of(command)[count - 1]


def at_server(pair: Pair, port: int, pool: Path) -> list[str]:
    return [
        "prepare",
        "--watch",
        "--server",
        f"127.0.0.1:{port}",
        "--insecure",
        "--pool",
        str(pool),
        "--draft-model",
        str(pair.public),
        *REQUEST,
    ]


@pytest.mark.slow
def test_two_machines_from_the_first_stock_to_the_end(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    pool = tmp_path / "client"
    server = start(*pair.serve("--pool", str(tmp_path / "provider")), stub="")
    client = start(*at_server(pair, server.until_listening(), pool), stub="", **QUICKLY)
    said(client, 1, "enough for a prompt of")
    use_up(pool, 20)
    said(client, 2, MORE)
    said(client, 3, "made correlated randomness in")
    server.send(signal.SIGKILL)
    server.wait(END_S)
    use_up(pool, 20)
    said(client, 5, AWAY)
    client.send(signal.SIGTERM)
    assert client.wait(END_S) == 0, client.stderr
    said(client, 6, "ended; what was made stays")
    assert "on the wire" not in client.stderr and len(lines_of(client)) == 6
    client.assert_gone()
    ((kind,),) = (stocks.kinds for stocks in stock.stocks(pool))
    # Of 48 and 16 more units, 40 were taken, each once.
    assert kind.units == 48 + 16 - 40


@pytest.mark.slow
def test_one_machine_ends_by_ctrl_c(start: Start, pair: Pair, tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    client = start(
        "prepare",
        "--watch",
        "--pool",
        str(pool),
        "--model",
        str(pair.private),
        "--draft-model",
        str(pair.public),
        *REQUEST,
        stub="",
        **QUICKLY,
    )
    client.until("stdout", "made correlated randomness")
    use_up(pool, 20)
    said(client, 3, "made correlated randomness in")
    client.send(signal.SIGINT, group=True)
    assert client.wait(END_S) == 0, client.stderr
    client.assert_gone(END_S)
    assert len(stock.stocks(pool)) == 2


@pytest.mark.slow
def test_a_completion_gets_a_directory_in_use_by_watch(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    """On two machines; the second time the completion is killed, and its claim goes with it."""
    pool = tmp_path / "client"
    server = start(*pair.serve("--pool", str(tmp_path / "provider")), stub="")
    port = server.until_listening()
    makes = start(*at_server(pair, port, pool), stub="client:preparing:holds", **QUICKLY)
    completion = pair.generate(port, "--pool", str(pool))

    def works(command: Command) -> bool:
        return any(p.is_worker for p in command.processes())

    for count, stub in [(1, ""), (2, "client:prefilling:holds")]:
        assert eventually(lambda: works(makes) and works(server), RUN_S)
        client = start(*completion, stub=stub)
        said(makes, count, STOPS)
        assert "waiting for prepare --watch to give way" in client.stderr
        if stub:
            client.until_phase("prefilling")
            client.send(signal.SIGKILL)
            client.wait(END_S)
        else:
            assert client.wait(RUN_S) == 0, client.stderr
        assert eventually(lambda n=count: server.stderr.count("a completion wants") == n, END_S)
    assert eventually(lambda: works(makes), RUN_S)
    makes.send(signal.SIGTERM)
    assert makes.wait(END_S) == 0, makes.stderr
    assert lines_of(makes) == [STOPS, STOPS, "ended; what was made stays"]


@pytest.mark.slow
def test_a_completion_gets_the_directories_of_both_parties(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    own = ["--model", str(pair.private), "--draft-model", str(pair.public)]
    own += ["--pool", str(tmp_path / "pool")]
    makes = start("prepare", "--watch", *own, *REQUEST, stub="client:preparing:holds", **QUICKLY)
    assert eventually(lambda: sum(p.is_worker for p in makes.processes()) == 2, RUN_S)
    demo = start("demo", *own, stub="")
    assert demo.wait(RUN_S) == 0, demo.stderr
    said(makes, 1, STOPS)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_it_may_end_while_correlations_is_made(
    start: Start, pair: Pair, tmp_path: Path, signum: int
) -> None:
    stub = "client:preparing:holds"
    server = start(*pair.serve("--pool", str(tmp_path / "provider")), stub=stub)
    port = server.until_listening()
    client = start(*at_server(pair, port, tmp_path / "client"), stub=stub)
    for party in (server, client):
        assert eventually(lambda p=party: any(w.is_worker for w in p.processes()), RUN_S)
    client.send(signum)
    assert client.wait(END_S) == 0, client.stderr
    assert lines_of(client) == ["ended; what was made stays"]
    client.assert_gone()
    server.until("stderr", "session failed")
    assert [p.pid for p in server.processes() if not p.is_worker] == [server.pid]
