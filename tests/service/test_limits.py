"""What a provider gives to one client, and what both hear when it has had all of it."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spu_llm.app import limiting
from spu_llm.app.cli import command_line
from spu_llm.core.errors import BusyError, InputError, LimitError, ManifestMismatch, PeerError
from spu_llm.net import identity, tls
from spu_llm.net.control_plane import ask_to_open
from spu_llm.net.entrance import Entrance
from spu_llm.net.frames import PREAMBLE, Frame, Kind, encode
from spu_llm.net.identity import CERTIFICATE
from spu_llm.net.manifest import with_nonce
from spu_llm.net.stream import listen
from spu_llm.net.uplink import Counters
from spu_llm.service import agreeing, limits, listening, provider
from spu_llm.service.admission import AdmissionControl
from spu_llm.service.client import Server, connected
from spu_llm.service.limits import Accounts, Quota, Quotas
from spu_llm.service.provider import ServeOptions
from spu_llm.service.provider import _Sessions as Sessions
from spu_llm.service.served_models import ServedModel, ServedModels
from tests.kit.command_line import refused
from tests.kit.models import PRIVATE
from tests.kit.pair import Pair
from tests.kit.patience import END_S, eventually
from tests.kit.processes import Start


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--client-memory", "20"], "the provider gives a client 20 MB of memory"),
        (["--client-traffic", "1"], "lets a client move 1 MB within an hour"),
    ],
)
def test_a_session_that_takes_too_much_ends_alone(
    start: Start, pair: Pair, option: list[str], said: str
) -> None:
    stub = "client:prefilling:floods" if "--client-traffic" in option else "client:decoding:holds"
    server = start(*pair.serve(*option), stub=stub)
    port = server.until_listening()
    client = start(*pair.generate(port), stub=stub)
    client.assert_failed(1, said, within_s=END_S)
    server.until("stderr", f"session failed: the provider {said.removeprefix('the provider ')}")
    assert not [p for p in server.processes() if p.is_worker]


class Relay:
    """Has moved so much."""

    def __init__(self, moved: int = 0) -> None:
        self.moved = moved

    def snapshot(self) -> Counters:
        return Counters(wire_bytes_sent=self.moved // 2, wire_bytes_received=self.moved // 2)


class Worker:
    """Has so much memory."""

    def __init__(self, memory: int = 0) -> None:
        self.memory = memory

    def memory_bytes(self) -> int:
        return self.memory


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    start, passed = 1000.0, [0.0]  # whole, so that sums are exact
    monkeypatch.setattr(limits.time, "monotonic", lambda: start + passed[0])

    def wait(seconds: float) -> None:
        passed[0] += seconds

    return wait


def watching(
    accounts: Accounts, client: Any, relay: Relay | None = None, worker: Worker | None = None
) -> Any:
    return accounts.watching(client, relay or Relay(), worker or Worker())  # type: ignore[arg-type]


ONE, OTHER = (SimpleNamespace(fingerprint=2 * name, name=name) for name in ("one", "other"))


def test_a_session_has_an_end(later: Callable[[float], None]) -> None:
    with watching(Accounts(Quotas(Quota(minutes=5))), ONE) as guard:
        guard()
        later(5 * 60)
        with pytest.raises(LimitError, match="after 5 minutes"):
            guard()


def test_traffic_counts_over_a_clients_sessions_for_an_hour(later: Callable[[float], None]) -> None:
    accounts = Accounts(Quotas(Quota(traffic_bytes=10_000_000)))
    with watching(accounts, ONE, Relay(6_000_000)), watching(accounts, ONE) as second:
        second()
    relay = Relay()
    with watching(accounts, ONE, relay) as third, watching(accounts, OTHER, Relay(9_000_000)):
        relay.moved = 5_000_000
        with pytest.raises(LimitError, match="move 10 MB within an hour, and this one moved 11 MB"):
            third()
    with pytest.raises(LimitError, match="try again later"):
        accounts.check(ONE)
    accounts.check(OTHER)
    accounts.check(None)
    later(60 * 60)
    accounts.check(ONE)


def test_memory_counts_over_workers_and_the_last_goes() -> None:
    accounts = Accounts(Quotas(Quota(memory_bytes=10_000_000)))
    worker = Worker(6_000_000)
    with (
        watching(accounts, ONE, worker=worker) as first,
        watching(accounts, OTHER, worker=Worker(9_000_000)) as stranger,
    ):
        with watching(accounts, ONE, worker=Worker(5_000_000)) as second:
            first()
            with pytest.raises(LimitError, match="10 MB of memory, and this one took 11 MB"):
                second()
        first()
        worker.memory = 11_000_000
        with pytest.raises(LimitError):
            accounts.check(ONE)
        with watching(accounts, ONE, worker=Worker(0)), pytest.raises(LimitError):
            first()  # though one came later whose worker has gone by now
        with pytest.raises(LimitError):
            first()
        stranger()


def test_a_steady_session_is_counted_by_the_hour(later: Callable[[float], None]) -> None:
    relay = Relay()
    with watching(Accounts(Quotas(Quota(traffic_bytes=10_000_000))), ONE, relay) as guard:
        for _ in range(300):
            relay.moved += 160_000
            guard()
            later(60)
        relay.moved += 1_000_000
        with pytest.raises(LimitError, match="and this one moved 10 MB"):
            guard()


def test_without_certificates_sessions_do_not_know_each_other() -> None:
    accounts = Accounts(Quotas(Quota(traffic_bytes=10, memory_bytes=10)))
    with watching(accounts, None, Relay(100), Worker(100)) as greedy:
        with watching(accounts, None) as other, pytest.raises(LimitError):
            other()
            greedy()
        accounts.check(None)


def test_what_calls_move_counts_too() -> None:
    accounts = Accounts(Quotas(Quota(traffic_bytes=10_000_000)))
    for _ in range(10):
        accounts.enter(ONE, 1_000_000)
        accounts.enter(None, 100_000_000)
    accounts.check(ONE)
    accounts.enter(ONE, 1)
    with pytest.raises(LimitError, match="within an hour"):
        accounts.check(ONE)
    accounts.check(OTHER)
    accounts.check(None)


def test_new_limits_are_for_new_sessions() -> None:
    accounts = Accounts(Quotas(Quota(traffic_bytes=10)))
    with watching(accounts, ONE, Relay(10)) as first:
        accounts.renew(Quotas(Quota(traffic_bytes=1)))
        first()
        with watching(accounts, ONE) as second, pytest.raises(LimitError):
            second()
        with pytest.raises(LimitError):
            accounts.check(ONE)


@pytest.mark.parametrize(
    ("options", "of_one"),
    [
        (["--sessions", "1"], 1),
        (["--sessions", "5"], 3),
        ([], 2),
        (["--client-sessions", "4"], 4),
        (["--sessions", "5", "--insecure"], 5),
    ],
)
def test_one_certificate_has_half_of_the_places(options: list[str], of_one: int) -> None:
    serve = ["serve", "--model", "m", "--listen", "h:1", *options]
    assert limiting.of(command_line().parse_args(serve)).others.sessions == of_one


def test_a_quota_goes_by_fingerprint_before_name() -> None:
    by_name, by_print, others = (Quota(sessions=n) for n in (3, 2, 1))
    quotas = Quotas(others, {"one": by_name, "oneone": by_print, "other": by_name})
    assert [quotas.of(client) for client in (ONE, OTHER, None)] == [by_print, by_name, others]  # type: ignore[arg-type]


def test_a_client_has_as_many_sessions_as_its_quota_says() -> None:
    admission = AdmissionControl(9, Quotas(Quota(sessions=1), {"one": Quota(sessions=2)}))
    task: Any = None
    for client, most in ((ONE, 2), (OTHER, 1)):
        for _ in range(most):
            admission.admit(task, client)  # type: ignore[arg-type]
        with pytest.raises(BusyError, match=f"has {most} sessions"):
            admission.admit(task, client)  # type: ignore[arg-type]


def test_one_clients_traffic_may_be_more_than_anothers(later: Callable[[float], None]) -> None:
    accounts = Accounts(Quotas(Quota(traffic_bytes=10), {"one": Quota(traffic_bytes=100)}))
    with watching(accounts, ONE, Relay(50)) as first:
        first()
    with watching(accounts, OTHER, Relay(50)) as second, pytest.raises(LimitError):
        second()


def parsed(path: Path, *options: str) -> Quotas:
    given = ["serve", "--model", "m", "--listen", "h:1", "--quotas", str(path), *options]
    return limiting.of(command_line().parse_args(given))


def test_a_file_names_what_some_clients_get(tmp_path: Path) -> None:
    path = tmp_path / "quotas.toml"
    path.write_text(
        '["client.example"]\nsessions = 4\ntraffic = 20\ndisk = 3\n[other]\nminutes = 5'
    )
    quotas = parsed(path, "--client-memory", "7", "--session-minutes", "9")
    assert quotas.others == Quota(2, 9, None, 7_000_000, None)
    assert quotas.named == {
        "client.example": Quota(4, 9, 20_000_000, 7_000_000, 3_000_000),
        "other": Quota(2, 5, None, 7_000_000, None),
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("sessions = 1", "stands in no table"),
        ("[a]\nspeed = 1", "a quota has sessions, minutes, traffic, memory, disk"),
        ("[a]\nsessions = 5", "sessions must be 1 to --sessions, 4, found 5"),
        ("[a]\nminutes = 0", "minutes must be 1 or more, found 0"),
        ("[a]\nmemory = true", "memory must be 1 or more, found True"),
        ("[a]\ntraffic = 'x'", "traffic must be 1 or more, found 'x'"),
        ("[a", "is no TOML file"),
    ],
)
def test_quotas_that_make_no_sense(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "quotas.toml"
    path.write_text(content)
    with pytest.raises(InputError, match=re.escape(said)):
        parsed(path)


@pytest.fixture
def calling(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Sessions, Callable[[], None]]]:
    """Yield a provider that gives a client 300 kB an hour, and a call of a client with a
    certificate.
    """
    for name in ("provider", "client"):
        identity.make(tmp_path / name, f"{name}.example", 30)
    own, client = (
        identity.load(tmp_path / one, tmp_path / other / CERTIFICATE)
        for one, other in (("provider", "client"), ("client", "provider"))
    )
    options = ServeOptions.rehearsal(
        pair.private,
        once=False,
        sessions=2,
        quotas=Quotas(Quota(traffic_bytes=300_000)),
        identity=own,
    )
    stated = agreeing.of_provider(PRIVATE, None, "local", 1)
    monkeypatch.setattr(provider, "REFUSAL_BYTES", 20_000)
    models = ServedModels([ServedModel("", pair.private, 0, Path("hints"), stated)])
    with (
        Sessions(options, models, lambda line: None, lambda event: None) as sessions,
        listen("127.0.0.1", 0) as listener,
        closing(Entrance(listener, own, lambda error: None)) as entrance,
    ):
        port = listener.getsockname()[1]
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                for met in entrance.wait(0.02):
                    sessions.start(met)

        thread = threading.Thread(target=run)
        thread.start()

        def call(**more: str) -> None:
            stream, _ = connected(Server("127.0.0.1", port, "local", client), tls.CONTROL)
            ask_to_open(stream, with_nonce({"jobs": 1, **more}), END_S)

        call.connect = lambda: connected(  # type: ignore[attr-defined]
            Server("127.0.0.1", port, "local", client), tls.DATA
        )[0]
        yield sessions, call
        ended.set()
        thread.join()


def test_calls_have_an_end(calling: tuple[Sessions, Callable[..., None]]) -> None:
    """A client calls with manifests as large as they may be, which come to nothing."""
    sessions, call = calling
    large = {f"request.{i}": "x" * 1000 for i in range(100)}
    for _ in range(2):
        with pytest.raises(ManifestMismatch):
            call(**large)
    deadline = time.monotonic() + END_S
    # Small ones, until the client hears why it gets no more; the last may pass the limit itself.
    with pytest.raises(PeerError, match="lets a client move 0 MB within an hour"):
        while time.monotonic() < deadline:
            with contextlib.suppress(ManifestMismatch):
                call()
    (client,) = sessions._accounts._of
    with pytest.raises(LimitError):
        sessions._accounts.check(SimpleNamespace(fingerprint=client, name=""))  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="moved more|lost|does not answer|ended"):
        call(**large)  # but is not listened to for long


def test_before_a_session_a_connection_moves_little(calling: tuple[Sessions, Any]) -> None:
    sessions, call = calling
    stream = call.connect()
    ping = encode(Frame(Kind.CONTROL, 0, b'{"type": "ping", "progress": 0}'))
    with closing(stream), pytest.raises(PeerError):
        stream.send_all(PREAMBLE)
        for _ in range(20 * listening.UNADMITTED_BYTES // len(ping) // 1000):
            stream.send_all(1000 * ping)
        while stream.recv_some(1 << 16):
            pass
        raise PeerError("it has ended")

    def counted() -> int:
        accounts = sessions._accounts._of.values()
        return sum(account.traffic_bytes(time.monotonic()) for account in accounts)

    assert eventually(lambda: counted() > 0, END_S)
    assert counted() < 2 * listening.UNADMITTED_BYTES


def test_clients_with_nothing_to_count_are_forgotten(later: Callable[[float], None]) -> None:
    accounts = Accounts(Quotas())
    for i in range(50):
        with watching(accounts, SimpleNamespace(fingerprint=str(i), name=""), Relay(1000)):
            later(6 * 60)
    assert len(accounts._of) <= 11


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--client-sessions", "2"], "there is none with --insecure"),
        (["--quotas", "q"], "there is none with --insecure"),
        (["--client-disk", "9"], "--client-disk bounds what is kept in --pool"),
        (["--client-disk", "9", "--pool", "p"], "there is none with --insecure"),
        (["--session-minutes", "0"], "--session-minutes must be 1 or more"),
        (["--client-memory", "0"], "--client-memory must be 1 or more, in MB"),
    ],
)
def test_limits_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], pair: Pair, options: list[str], said: str
) -> None:
    assert said in refused(capsys, *pair.serve(*options))
