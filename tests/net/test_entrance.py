"""Who gets in at a server's entrance, who is put out, and for whom."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spu_llm.core.errors import InputError, PeerError
from spu_llm.net import entrance, identity, tls
from spu_llm.net.crowd import Crowd, origin_of
from spu_llm.net.entrance import Entrance, Met
from spu_llm.net.identity import CERTIFICATE, KEY, Identity
from spu_llm.net.stream import Metered, TcpStream, listen
from tests.kit.patience import SOON_S, eventually

from .conftest import Bench

HERE = "127.0.0.1"


def test_who_comes_gets_the_place_of_who_holds_most() -> None:
    crowd = Crowd[int](4)
    assert [crowd.enter(i, group) for i, group in enumerate("aabb")] == [None] * 4
    assert crowd.enter(4, "c") == 0  # a and b hold two each, a came first
    assert crowd.enter(5, "c") == 2
    assert crowd.enter(6, "c") == 4  # who holds most puts out its own
    assert crowd.all() == [1, 3, 5, 6]
    assert crowd.leave(3) and not crowd.leave(3) and not crowd.leave(0)
    assert crowd.enter(7, "d") is None and len(crowd) == 4


def test_one_group_never_puts_out_another() -> None:
    crowd = Crowd[int](8)
    crowd.enter(-1, "known")
    assert -1 not in [crowd.enter(i, "stranger") for i in range(100)]
    assert -1 in crowd.all()


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:1:aaaa::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff::2", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::1", "2001:db8:0:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_origin_is_an_address_or_a_network(address: str, origin: str) -> None:
    assert origin_of(address) == origin


class Open:
    """An entrance that is looked after, and whom it has met or refused."""

    def __init__(self, own: Identity | None, host: str = HERE) -> None:
        self.met: list[Met] = []
        self.refused: list[str] = []
        listener = listen(host, 0)
        self.port: int = listener.getsockname()[1]
        self.entrance = Entrance(listener, own, lambda error: self.refused.append(str(error)))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.met += self.entrance.wait(0.02)

    def dial(self, host: str = HERE) -> socket.socket:
        return socket.create_connection((host, self.port), SOON_S)

    def meet(self, own: Identity) -> tls.TlsStream:
        return tls.as_client(TcpStream(self.dial()), own, HERE, timeout_s=SOON_S)

    def refuse(self, own: Identity) -> str:
        """Why one with this identity is refused."""
        with pytest.raises(PeerError) as error, contextlib.closing(self.meet(own)) as stream:
            stream.recv_some(1)
        return str(error.value)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.entrance.close()
        for met in self.met:
            met.tcp.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parties")
    for name in ("server", "client", "stranger"):
        identity.make(root / name, f"{name}.example", 30)
    return root


@pytest.fixture
def known(folders: Path) -> Callable[[str, str], Identity]:
    return lambda own, other: identity.load(folders / own, folders / other / CERTIFICATE)


@pytest.fixture
def opened(bench: Bench) -> Iterator[Callable[..., Open]]:
    """Entrances; afterwards no thread and no descriptor may be left."""
    with contextlib.ExitStack() as stack:

        def make(*arguments: object) -> Open:
            made = Open(*arguments)  # type: ignore[arg-type]
            stack.callback(made.close)
            return made

        yield make


def closed(sock: socket.socket) -> bool:
    """Return whether the server has closed this connection."""
    sock.settimeout(0.01)
    try:
        return sock.recv(1 << 16) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_client_is_met_among_strangers_of_its_own_address(
    opened: Callable[..., Open],
    known: Callable[[str, str], Identity],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entrance, "PLACES", 8)
    at = opened(known("server", "client"))
    strangers = [at.dial() for _ in range(20)]
    assert eventually(lambda: sum(map(closed, strangers)) == 12, SOON_S)
    assert all(map(closed, strangers[:12])), "the oldest go"
    stream = at.meet(known("client", "server"))
    assert eventually(lambda: len(at.met) == 1, SOON_S)
    assert at.met[0].peer == known("client", "server").own
    assert at.met[0].own == known("server", "client").own
    assert at.met[0].caller == known("client", "server").own.fingerprint
    # It is not among them any more, however many come.
    strangers += [at.dial() for _ in range(20)]
    assert eventually(lambda: sum(map(closed, strangers)) == 32, SOON_S)
    stream.send_all(b"here")
    assert at.met[0].stream.recv_some(10) == b"here"
    stream.close()
    for sock in strangers:
        sock.close()


def test_strangers_of_one_address_put_out_none_of_another(
    opened: Callable[..., Open],
    known: Callable[[str, str], Identity],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entrance, "PLACES", 8)
    at = opened(known("server", "client"))
    slow = socket.create_connection((HERE, at.port), SOON_S, ("127.0.0.2", 0))
    assert eventually(lambda: len(at.entrance._guests) == 1, SOON_S)
    strangers = [at.dial() for _ in range(30)]
    assert eventually(lambda: sum(map(closed, strangers)) == 23, SOON_S)
    assert not closed(slow)
    for sock in (slow, *strangers):
        sock.close()


def test_whoever_is_late_or_says_too_much_goes(
    opened: Callable[..., Open],
    known: Callable[[str, str], Identity],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entrance, "HANDSHAKE_S", 0.2)
    at = opened(known("server", "client"))
    silent = at.dial()
    assert eventually(lambda: closed(silent), SOON_S)
    assert at.refused == ["the peer did not answer in time"]
    silent.close()
    monkeypatch.setattr(entrance, "HANDSHAKE_S", SOON_S)
    monkeypatch.setattr(tls, "HANDSHAKE_BYTES", 1000)
    # A record that is never whole, so that OpenSSL waits for the rest of it.
    chatty = at.dial()
    with contextlib.suppress(OSError):
        chatty.sendall(b"\x16\x03\x01\x40\x00\x01" + bytes(8000))
    assert eventually(lambda: closed(chatty), SOON_S)
    assert len(at.refused) == 2
    assert "is not known yet" in at.refused[1] or "TLS with the peer" in at.refused[1]
    chatty.close()


def test_whoever_is_refused_hears_why(
    opened: Callable[..., Open], known: Callable[[str, str], Identity]
) -> None:
    at = opened(known("server", "client"))
    assert "does not trust this party's certificate" in at.refuse(known("stranger", "server"))
    assert eventually(lambda: len(at.entrance._guests) == 0, SOON_S)
    assert len(at.refused) == 1 and "certificate is refused" in at.refused[0] and not at.met


def test_a_refusal_arrives_though_more_was_said_than_was_read(
    opened: Callable[..., Open], known: Callable[[str, str], Identity]
) -> None:
    at = opened(known("server", "client"))
    with contextlib.closing(at.dial()) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" + bytes(200_000))
        assert eventually(lambda: len(at.refused) == 1, SOON_S)
        assert sock.recv(100) == tls._ALERT


def test_in_the_clear_a_byte_is_enough(opened: Callable[..., Open]) -> None:
    at = opened(None)
    silent, client = at.dial(), at.dial()
    client.sendall(b"P")
    assert eventually(lambda: len(at.met) == 1, SOON_S)
    (met,) = at.met
    assert (met.peer, met.caller) == (None, HERE) and met.stream.recv_some(9) == b"P"
    silent.close()
    assert eventually(lambda: len(at.refused) == 1, SOON_S)
    assert "before it said anything" in at.refused[0]
    client.close()


def test_another_identity_holds_for_whoever_comes_then(
    opened: Callable[..., Open],
    known: Callable[[str, str], Identity],
    folders: Path,
    tmp_path: Path,
) -> None:
    """Who was met before stays; one that TLS cannot use replaces nothing."""
    at = opened(known("server", "client"))
    before = at.meet(known("client", "server"))
    identity.make(tmp_path / "server", "server.example", 30)
    renewed = identity.load(tmp_path / "server", folders / "stranger" / CERTIFICATE)
    at.entrance.renew(renewed)
    stranger = identity.load(folders / "stranger", tmp_path / "server" / CERTIFICATE)
    after = at.meet(stranger)
    assert eventually(lambda: len(at.met) == 2, SOON_S)
    assert [met.own for met in at.met] == [known("server", "client").own, renewed.own]
    client = identity.load(folders / "client", tmp_path / "server" / CERTIFICATE)
    assert "does not trust this party's certificate" in at.refuse(client)  # it is revoked
    broken = identity.Identity(
        folders, renewed.own, folders, renewed.anchors, (), (), b"no certificate"
    )
    with pytest.raises(InputError):
        at.entrance.renew(broken)
    again = at.meet(stranger)
    at.met[0].stream.send_all(b"still here")
    assert before.recv_some(20) == b"still here"
    for stream in (before, after, again):
        stream.close()


def test_an_identity_is_what_was_read_not_what_files_hold(folders: Path, tmp_path: Path) -> None:
    """Also when a key has been written already whose certificate has not."""
    own = tmp_path / "own"
    identity.make(own, "server.example", 30)
    read = identity.load(own, folders / "client" / CERTIFICATE)
    identity.make(tmp_path / "next", "server.example", 30)
    (own / KEY).write_bytes((tmp_path / "next" / KEY).read_bytes())
    assert isinstance(tls.server_context(read), ssl.SSLContext)
    with pytest.raises(InputError, match="is not the key of"):
        identity.load(own, folders / "client" / CERTIFICATE)
    assert "BEGIN" not in repr(read).replace(read.anchors, "").replace(repr(read.anchors), "")


def test_a_metered_stream_ends_beyond_what_it_may_move(bench: Bench) -> None:
    one, other = bench.streams()
    heard: list[int] = []
    metered = Metered(one, 10, heard.append)
    metered.send_all(b"1234")
    other.send_all(b"123456")
    assert metered.recv_some(20) == b"123456" and heard == [4, 6]
    with pytest.raises(PeerError, match="moved more than the 10 bytes that it may"):
        metered.send_all(b"x")
    assert other.recv_some(9) == b"1234" and other.recv_some(9) == b""
    other.close()
    one, other = bench.streams()
    metered = Metered(one, 10)
    metered.most = None
    metered.send_all(bytes(100))
    metered.close()
    other.close()


def test_nothing_is_left_of_those_who_were_not_met(opened: Callable[..., Open]) -> None:
    at = opened(None)
    waiting = [at.dial() for _ in range(5)]
    assert eventually(lambda: len(at.entrance._guests) == 5, SOON_S)
    at._stop.set()
    at._thread.join()
    at.entrance.close()
    started = time.monotonic()
    assert eventually(lambda: all(map(closed, waiting)), SOON_S)
    assert time.monotonic() - started < entrance.HANDSHAKE_S
    with pytest.raises(OSError):
        at.dial()
    for sock in waiting:
        sock.close()
