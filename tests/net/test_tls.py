"""Mutual TLS: who is let in, what the other side is told, and that bytes come as they were."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.core.errors import InputError, PeerError
from spu_llm.net import identity as identities
from spu_llm.net import tls
from spu_llm.net.frames import PREAMBLE
from spu_llm.net.identity import CERTIFICATE, KEY, Identity
from spu_llm.net.stream import TcpStream
from tests.kit.patience import SOON_S

from .conftest import as_server

NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)


def party(
    folder: Path,
    name: str,
    *,
    issuer: Path | None = None,
    ca: bool = False,
    since: datetime.datetime = NOW - DAY,
    until: datetime.datetime = NOW + DAY,
    key: Any = None,
) -> Path:
    """Return a directory like that of `identities.make`, of any validity, signed by `issuer` or
    itself.
    """
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    signer: Any = key
    signed_by = subject
    if issuer is not None:
        signer = serialization.load_pem_private_key((issuer / KEY).read_bytes(), None)
        signed_by = x509.load_pem_x509_certificate((issuer / CERTIFICATE).read_bytes()).subject
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signed_by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    folder.mkdir()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / KEY).touch(0o600)
    (folder / KEY).write_bytes(pem)
    (folder / CERTIFICATE).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return folder


def trusting(own: Path, *others: Path) -> Identity:
    trust = own / "trust.pem"
    trust.write_bytes(b"".join((other / CERTIFICATE).read_bytes() for other in others))
    return identities.load(own, trust)


def meet(client: Callable[[TcpStream], Any], provider: Callable[[TcpStream], Any]) -> list[Any]:
    """Return what both sides of a connection come to: a stream each, or an error."""
    collected: list[Any] = [None, None]
    ends = _tcp_pair()

    def run(i: int, work: Callable[[TcpStream], Any]) -> None:
        try:
            collected[i] = work(ends[i])
        except PeerError as error:
            collected[i] = error

    threads = [
        threading.Thread(target=run, args=(i, work)) for i, work in enumerate((client, provider))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    return collected


def _tcp_pair() -> list[TcpStream]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return [TcpStream(one), TcpStream(listener.accept()[0])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parties")
    made = {name: root / name for name in ("client", "provider", "stranger")}
    for name, folder in made.items():
        identities.make(folder, f"{name}.example", 30)
    made["authority"] = party(root / "authority", "authority.example", ca=True)
    for name in ("client", "provider"):
        made[f"{name} of authority"] = party(
            root / f"{name}_signed", f"{name}.example", issuer=made["authority"]
        )
    return made


def both(client: Identity, provider: Identity, host: str = "provider.example") -> list[Any]:
    context = tls.server_context(provider)

    def serve(tcp: TcpStream) -> tls.TlsStream:
        # The first byte too: a client's certificate is judged after it is through with its part.
        stream = as_server(tcp, context)
        stream.send_all(b"!")
        return stream

    def ask(tcp: TcpStream) -> tls.TlsStream:
        stream = tls.as_client(tcp, client, host)
        if stream.recv_some(1) != b"!":
            raise PeerError("closed")
        return stream

    return meet(ask, serve)


def close(streams: list[Any]) -> None:
    for stream in streams:
        if isinstance(stream, tls.TlsStream):
            stream.close()


def test_pinned_parties_know_each_other(folders: dict[str, Path]) -> None:
    client = trusting(folders["client"], folders["provider"])
    provider = trusting(folders["provider"], folders["stranger"], folders["client"])
    outcomes = both(client, provider, host="10.0.0.1")  # by whatever address
    assert [stream.peer for stream in outcomes] == [provider.own, client.own]
    assert outcomes[0].peer.name == "provider.example"
    close(outcomes)


def test_a_client_trusts_one_provider_or_authorities(folders: dict[str, Path]) -> None:
    for others in (("provider", "stranger"), ("provider", "authority")):
        known = trusting(folders["client"], *(folders[other] for other in others))
        with pytest.raises(InputError, match="a client trusts one provider, or authorities"):
            identities.demanded_name(known, "provider.example")


def test_an_authority_answers_for_names(folders: dict[str, Path]) -> None:
    client = trusting(folders["client of authority"], folders["authority"])
    provider = trusting(folders["provider of authority"], folders["authority"])
    outcomes = both(client, provider)
    assert outcomes[0].peer == provider.own and outcomes[1].peer == client.own
    close(outcomes)
    outcomes = both(client, provider, host="other.example")
    assert "not valid for 'other.example'" in str(outcomes[0])
    assert isinstance(outcomes[1], PeerError)


@pytest.mark.parametrize(
    ("client", "provider", "to_client", "to_provider"),
    [
        # The client trusts a stranger, the provider the client; and the other way round.
        ("stranger", "client", "certificate is refused", "does not trust this party's"),
        ("provider", "stranger", "does not trust this party's", "certificate is refused"),
    ],
)
def test_strangers_are_refused_and_told(
    folders: dict[str, Path], client: str, provider: str, to_client: str, to_provider: str
) -> None:
    outcomes = both(
        trusting(folders["client"], folders[client]),
        trusting(folders["provider"], folders[provider]),
    )
    assert to_client in str(outcomes[0]) and to_provider in str(outcomes[1])


@pytest.mark.parametrize(
    ("since", "until", "said"),
    [(NOW - 3 * DAY, NOW - DAY, "expired"), (NOW + DAY, NOW + 2 * DAY, "not yet valid")],
)
def test_a_certificate_out_of_its_time(
    folders: dict[str, Path], tmp_path: Path, since: Any, until: Any, said: str
) -> None:
    """The other party's, signed by an authority; one's own is refused before it is shown."""
    late = party(
        tmp_path / "late", "provider.example", issuer=folders["authority"], since=since, until=until
    )
    with pytest.raises(InputError, match="expired on|is not valid before"):
        trusting(late, folders["authority"])
    trust = late / "trust.pem"
    own = identities._described(x509.load_pem_x509_certificate((late / CERTIFICATE).read_bytes()))
    pem = b"".join((late / name).read_bytes() for name in (CERTIFICATE, KEY))
    provider = Identity(late, own, trust, trust.read_text(), (), (own,), pem)
    outcomes = both(trusting(folders["client of authority"], folders["authority"]), provider)
    assert said in str(outcomes[0]) and isinstance(outcomes[1], PeerError)


def test_others_out_of_their_time_are_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    """Of many that are trusted one that expires keeps nobody else out; one alone is refused."""
    late = party(tmp_path / "late", "late.example", since=NOW - 3 * DAY, until=NOW - DAY)
    trust = tmp_path / "clients.pem"
    expired, valid = ((f / CERTIFICATE).read_text() for f in (late, folders["client"]))
    trust.write_text(expired + valid)
    actual = identities.load(folders["provider"], trust)
    (client,) = actual.pinned
    assert client.name == "client.example" and expired not in actual.anchors
    trust.write_text(expired)
    with pytest.raises(InputError, match="late.example expired on"):
        identities.load(folders["provider"], trust)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("since", [NOW - DAY, NOW + DAY])
def test_a_certificate_whose_names_cannot_be_read(
    folders: dict[str, Path], tmp_path: Path, since: Any, own: bool
) -> None:
    """Also where it would be refused for its time."""
    spoilt = party(tmp_path / "spoilt", "a.example", since=since, until=NOW + 2 * DAY)
    whole = x509.load_pem_x509_certificate((spoilt / CERTIFICATE).read_bytes())
    names = b"\x06\x03\x55\x1d\x11\x04"  # that of the extension, and a string
    der = whole.public_bytes(serialization.Encoding.DER)
    at = der.index(names) + len(names) + 2  # in the string: a sequence of names, and its length
    der = der[:at] + bytes([der[at + 1] + 60]) + der[at + 1 :]
    pem = ssl.DER_cert_to_PEM_cert(der)
    (spoilt / CERTIFICATE).write_text(pem)
    with pytest.raises(InputError, match="holds a malformed certificate"):
        trusting(*(spoilt, folders["client"]) if own else (folders["client"], spoilt))


def test_a_key_that_tls_does_not_take(folders: dict[str, Path], tmp_path: Path) -> None:
    weak = party(tmp_path / "weak", "a.example", key=rsa.generate_private_key(65537, 1024))
    with pytest.raises(InputError, match="cannot be used: .*; spu-llm keygen makes another"):
        tls.server_context(trusting(weak, folders["client"]))


def test_no_certificate_no_tls_and_older_tls(folders: dict[str, Path]) -> None:
    context = tls.server_context(trusting(folders["provider"], folders["client"]))

    def serve(tcp: TcpStream) -> Any:
        return as_server(tcp, context, 2.0)

    def plain(tcp: TcpStream) -> None:
        tcp.send_all(b"GET / HTTP/1.1\r\n\r\n")

    assert "not speaking TLS, but HTTP" in str(meet(plain, serve)[1])

    def ours(tcp: TcpStream) -> None:
        tcp.send_all(PREAMBLE + bytes(30))

    assert "not speaking TLS; was it started with --insecure" in str(meet(ours, serve)[1])

    def anonymous(version: Any) -> Callable[[TcpStream], Any]:
        def work(tcp: TcpStream) -> Any:
            other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            other.check_hostname, other.verify_mode = False, ssl.CERT_NONE
            other.maximum_version = version
            memory = tls.Memory()
            engine = other.wrap_bio(memory.incoming, memory.outgoing)
            return tls._met(tcp, engine, memory, SOON_S).recv_some(1)

        return work

    actual = meet(anonymous(ssl.TLSVersion.TLSv1_3), serve)
    assert "the peer showed no certificate" in str(actual[1])
    assert "demands a certificate; give --identity" in str(actual[0])
    actual = meet(anonymous(ssl.TLSVersion.TLSv1_2), serve)
    assert "does not speak TLS 1.3" in str(actual[1])
    assert isinstance(actual[0], PeerError)


def test_who_says_nothing_is_not_waited_for(folders: dict[str, Path]) -> None:
    context = tls.server_context(trusting(folders["provider"], folders["client"]))
    silent = threading.Event()
    actual = meet(lambda tcp: silent.wait(0.5), lambda tcp: as_server(tcp, context, 0.1))
    assert "did not answer in time" in str(actual[1])
    actual = meet(lambda tcp: tcp.close(), lambda tcp: as_server(tcp, context, SOON_S))
    assert "closed the connection before it showed a certificate" in str(actual[1])


@pytest.fixture(scope="module")
def connected(folders: dict[str, Path]) -> Any:
    outcomes = both(
        trusting(folders["client"], folders["provider"]),
        trusting(folders["provider"], folders["client"]),
    )
    yield outcomes
    close(outcomes)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 700_000), min_size=1, max_size=4), st.integers(1, 1 << 20))
def test_bytes_come_as_they_were(connected: Any, sizes: list[int], at_once: int) -> None:
    """In both directions at the same time."""
    sent = [os.urandom(sum(sizes)) for _ in range(2)]
    received = [bytearray(), bytearray()]

    def send(i: int) -> None:
        start = 0
        for size in sizes:
            connected[i].send_all(memoryview(sent[i])[start : start + size])
            start += size

    def receive(i: int) -> None:
        while len(received[i]) < sum(sizes):
            received[i] += connected[i].recv_some(at_once)

    threads = [
        threading.Thread(target=work, args=(i,)) for work in (send, receive) for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert [bytes(data) for data in received] == sent[::-1]


def test_the_end_is_heard_and_closes_what_waits(folders: dict[str, Path]) -> None:
    one, other = both(
        trusting(folders["client"], folders["provider"]),
        trusting(folders["provider"], folders["client"]),
    )
    one.send_all(b"last")
    one.close()
    one.close()
    assert other.recv_some(10) == b"last" and other.recv_some(10) == b""
    with pytest.raises(PeerError, match="closed"):
        one.send_all(b"more")
    waiting: list[Any] = []

    def wait() -> None:
        try:
            waiting.append(other.recv_some(1))
        except PeerError as error:
            waiting.append(error)

    one, other = both(
        trusting(folders["client"], folders["provider"]),
        trusting(folders["provider"], folders["client"]),
    )
    thread = threading.Thread(target=wait)
    thread.start()
    other.close()
    thread.join(SOON_S)
    assert not thread.is_alive() and len(waiting) == 1
    one.close()


def test_what_was_tampered_with_ends_the_connection(folders: dict[str, Path]) -> None:
    one, other = both(
        trusting(folders["client"], folders["provider"]),
        trusting(folders["provider"], folders["client"]),
    )
    record = bytearray(one._sealed(memoryview(b"a secret")))
    assert b"secret" not in record
    record[-1] ^= 1
    one._tcp.send_all(bytes(record))
    with pytest.raises(PeerError, match="TLS with the peer failed"):
        other.recv_some(10)
    close([one, other])


def test_a_disk_that_is_full_leaves_no_key_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """keygen can be given again, whichever of its files could not be written."""
    sync, left = os.fsync, [0]

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(identities.os, "fsync", full)
    for fits in (0, 1):
        left[0] = fits
        with pytest.raises(InputError, match="cannot write to .*No space left"):
            identities.make(tmp_path / "me", "me.example", 30)
        assert not list((tmp_path / "me").iterdir())
    left[0] = 2
    identities.make(tmp_path / "me", "me.example", 30)
    with pytest.raises(InputError, match=f"{KEY} is there already"):
        identities.make(tmp_path / "me", "me.example", 30)
    assert {file.name for file in (tmp_path / "me").iterdir()} == {KEY, CERTIFICATE}
