"""Certificates, whom a server trusts, and limits, read again while it runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spu_llm.app import limiting, reloading
from spu_llm.app.cli import command_line
from spu_llm.app.named_models import NamedModel
from spu_llm.core.errors import InputError, PeerError
from spu_llm.net import identity, tls
from spu_llm.net.control_plane import check_health
from spu_llm.net.identity import CERTIFICATE, KEY
from spu_llm.net.messages import Messages
from spu_llm.net.stream import connect
from spu_llm.service import renewing
from spu_llm.service.client import Server, connected
from spu_llm.service.renewing import Loaded, Renewal, look_at
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import Command, Start
from tests.vault.commands import engine, vault


@contextlib.contextmanager
def hangups(disposition: signal.Handlers) -> Iterator[None]:
    """Yield what a process that is started in it inherits: under nohup, SIGHUP is ignored."""
    before = signal.signal(signal.SIGHUP, disposition)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class Watched:
    """A renewal of what a file says, which may be wrong."""

    def __init__(self, file: Path) -> None:
        self.file, self.used, self.lines = file, list[str](), list[str]()
        self.renewal = Renewal(self.load(), self.load, self.lines.append)

    def load(self) -> Loaded[str]:
        seen, text = look_at([self.file]), self.file.read_text()
        if text.startswith("bad"):
            raise InputError(f"{text} is wrong")
        return Loaded(text, seen, {"certificate": text[:1], "text": text})

    def use(self, text: str) -> None:
        if text.startswith("refused"):
            raise InputError(f"{text} cannot be used")
        self.used.append(text)

    def look(self) -> list[str]:
        """Return what is said at the next look."""
        before = len(self.lines)
        self.renewal.look(self.use)
        return self.lines[before:]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(renewing, "LOOK_S", 0.0)
    (tmp_path / "file").write_text("one")
    with hangups(signal.SIG_IGN):
        yield Watched(tmp_path / "file")


def test_a_file_that_has_changed_is_read_again(watched: Watched) -> None:
    assert watched.look() == []
    watched.file.write_text("other")
    assert watched.look() == ["reloaded for new sessions: certificate o; text other"]
    assert watched.look() == [] and watched.used == ["other"]


def test_what_cannot_be_read_replaces_nothing_and_is_retried(watched: Watched) -> None:
    for text, why in (("bad", "bad is wrong"), ("refused", "refused cannot be used")):
        watched.file.write_text(text)
        assert watched.look() == [f"not reloaded, all stays as it was: {why}"]
        assert watched.look() == [], "said once"
    watched.file.unlink()
    assert "not reloaded" in watched.look()[0] and watched.used == []
    watched.file.write_text("third")
    assert watched.look() == ["reloaded for new sessions: certificate t; text third"]
    assert watched.used == ["third"]


def test_sighup_is_always_answered(watched: Watched) -> None:
    signal.raise_signal(signal.SIGHUP)
    assert watched.look() == ["reloaded for new sessions: certificate o; nothing has changed"]
    watched.file.write_text("bad")
    for _ in range(2):
        signal.raise_signal(signal.SIGHUP)
        assert watched.look() == ["not reloaded, all stays as it was: bad is wrong"]


def test_a_folder_that_is_exchanged_by_a_link_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes does: the file's own link stays, what it leads through is replaced."""
    monkeypatch.setattr(renewing, "LOOK_S", 0.0)
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "file").write_text(version)
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "file").symlink_to("..data/file")
    with hangups(signal.SIG_IGN):
        watched = Watched(tmp_path / "file")
        (tmp_path / "next").symlink_to("2")
        os.replace(tmp_path / "next", tmp_path / "..data")
        assert watched.look() and watched.used == ["2"]


def test_a_file_that_changes_while_it_is_read_is_read_again(watched: Watched) -> None:
    load, texts = watched.load, iter(["second", "last"])

    def meanwhile() -> Loaded[str]:
        loaded = load()
        if (text := next(texts, None)) is not None:
            watched.file.write_text(text)
        return loaded

    watched.renewal._again = meanwhile
    watched.file.write_text("first")
    for _ in range(4):
        watched.look()
    assert watched.used == ["first", "second", "last"]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    root = tmp_path / "identities"
    for name in ("owner", "owner-2", "vault", "vault-2", "user", "other"):
        identity.make(root / name, f"{name}.example", 30)
    return root


def copy(source: Path, target: Path, *names: str) -> None:
    """Put files where a server reads them, each whole."""
    for name in names:
        shutil.copy2(source / name, target / "written")
        os.replace(target / "written", target / name)


def test_what_only_a_restart_changes_is_named_and_stays(folders: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    table = "[serve]\nlisten = 'h:1'\nmodel = 'a'\nidentity = 'identities/owner'\n"
    table += "trust = 'identities/user/cert.pem'\n"
    file.write_text(table)

    def parsed() -> object:
        return command_line().parse_args(["serve", "--config", str(file)])

    options = parsed()
    options.again = parsed  # type: ignore[attr-defined]
    made = []
    with hangups(signal.SIG_IGN):
        _, renewal = reloading.loaded(
            options,
            lambda actual: made.append(actual) or actual,  # type: ignore[arg-type,func-returns-value]
            lambda actual: {"trust": identity.load(actual.identity, actual.trust)},
        )
    file.write_text(table.replace("'a'", "'b'") + "sessions = 7\nonce = true\n")
    loaded = renewal._again()
    assert loaded.fixed == ["--model", "--once"] and loaded.said["sessions"] == "7"
    assert (
        made[-1].model == [NamedModel("", tmp_path / "a")]
        and not made[-1].once
        and made[-1].sessions == 7
    )
    line = renewing._words(renewal._held, loaded)
    assert line.endswith("; sessions 7; only a restart changes --model, --once")
    own = identity.load(folders / "owner", folders / "user" / CERTIFICATE).own
    assert f"certificate owner.example ({own.fingerprint[:16]}, valid until " in line
    assert "trust " not in line


def test_another_content_of_a_quotas_file_is_said(folders: Path, tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text("[user]\nsessions = 1\n")
    given = ["serve", "--model", "m", "--listen", "h:1", "--quotas", str(file)]
    given += ["--identity", str(folders / "owner")]
    given += ["--trust", str(folders / "user" / CERTIFICATE)]

    def parsed() -> object:
        return command_line().parse_args(given)

    options = parsed()
    options.again = parsed  # type: ignore[attr-defined]
    with hangups(signal.SIG_IGN):
        first, renewal = reloading.loaded(options, limiting.of, lambda quotas: {})  # type: ignore[arg-type]
    file.write_text("[user]\nsessions = 2\n")
    assert look_at(renewal._held.seen) != renewal._held.seen
    loaded = renewal._again()
    assert (first.named["user"].sessions, loaded.options.named["user"].sessions) == (1, 2)
    assert loaded.said["quotas"] != renewal._held.said["quotas"]


@pytest.mark.slow
@pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN])
def test_serve_goes_on_under_what_it_reads(
    start: Start, pair: Pair, folders: Path, tmp_path: Path, inherited: signal.Handlers
) -> None:
    own, trust, file = tmp_path / "own", tmp_path / "trusted.pem", tmp_path / "config.toml"
    shutil.copytree(folders / "owner", own)
    shutil.copy2(folders / "user" / CERTIFICATE, trust)
    table = f"[serve]\nmodel = '{pair.private}'\nlisten = '127.0.0.1:0'\n"
    table += "identity = 'own'\ntrust = 'trusted.pem'\n"
    file.write_text(table)
    with hangups(inherited):
        server = start("serve", "--config", str(file), stub="client:decoding:holds")
    port = server.until_listening()

    def well(who: str, owner: Path = own) -> bool:
        known = identity.load(folders / who, owner / CERTIFICATE)
        stream, _ = connected(Server("127.0.0.1", port, "local", known), tls.CONTROL)
        return check_health(stream, END_S)

    credentials = ["--identity", str(folders / "user"), "--trust", str(own / CERTIFICATE)]
    client = start(
        "generate",
        "--draft-model",
        str(pair.public),
        "--server",
        f"127.0.0.1:{port}",
        *credentials,
        stub="client:decoding:holds",
    )
    client.until_phase("decoding")
    # Another client in place of the first one, whose session goes on.
    shutil.copy2(folders / "other" / CERTIFICATE, trust)
    file.write_text(f"{table}sessions = 1\n")
    server.send(signal.SIGHUP)
    server.until("stderr", "reloaded for new sessions: certificate owner.example (")
    server.until("stderr", "; sessions 1")
    line = next(line for line in server.stderr.splitlines() if "reloaded" in line)
    assert "; trust other.example (" in line
    assert well("other")
    with pytest.raises(PeerError, match="does not trust this party's certificate"):
        well("user")
    assert [p for p in client.processes() if p.is_worker]
    # A certificate is renewed: first its key. Nobody has to say so.
    copy(folders / "owner-2", own, KEY)
    server.until("stderr", f"all stays as it was: {own / KEY} is not the key of")
    assert well("other", folders / "owner")
    copy(folders / "owner-2", own, CERTIFICATE)
    server.until("stderr", "certificate owner-2.example (")
    assert well("other", folders / "owner-2")
    file.write_text("[serve]\nsessions = 'many'\n")
    server.until("stderr", "all stays as it was: argument --sessions: invalid int value: 'many'")
    assert well("other", folders / "owner-2")
    client.send(signal.SIGINT)
    assert client.wait(END_S) == 130
    server.send(signal.SIGTERM)
    assert server.wait(END_S) == 128 + signal.SIGTERM
    assert "Traceback" not in server.stderr


def test_split_serve_reloads(start: Start, pair: Pair, folders: Path) -> None:
    server = start(
        "split",
        "serve",
        "--mode",
        "plain",
        "--split",
        "0,0",
        "--model",
        str(pair.private),
        "--listen",
        "127.0.0.1:0",
        "--identity",
        str(folders / "owner"),
        "--trust",
        str(folders / "user" / CERTIFICATE),
    )
    server.until_listening()
    server.send(signal.SIGHUP)
    server.until("stderr", "reloaded for new sessions: certificate owner.example")
    assert "; nothing has changed" in server.stderr


@pytest.fixture
def met(folders: Path) -> Callable[[int, str, str], bool]:
    """Return whether a process of vault mode that listens there is this one, and lets this one
    in.
    """

    def meets(port: int, own: str, other: str) -> bool:
        known = identity.load(folders / own, folders / other / CERTIFICATE)
        try:
            stream = tls.as_client(connect("127.0.0.1", port, END_S), known, "127.0.0.1")
            messages = Messages(stream, other, END_S)
            with contextlib.closing(messages):
                messages.say("hello")
                while messages.hear("evidence", "model")["type"] != "model":
                    pass  # a vault has evidence to show first
        except PeerError:
            return False
        return True

    return meets


@pytest.mark.slow
def test_engine_and_vault_renew_their_certificates(
    start: Start, pair: Pair, folders: Path, tmp_path: Path, met: Callable[[int, str, str], bool]
) -> None:
    for name in ("owner", "vault"):
        shutil.copytree(folders / name, tmp_path / name)
    trusted = {name: tmp_path / f"{name}.pem" for name in ("owner", "vault")}
    for name, path in trusted.items():
        shutil.copy2(folders / name / CERTIFICATE, path)
    user = ["--trust-user", str(folders / "user" / CERTIFICATE)]
    served = engine(
        start, pair.private, "--identity", str(tmp_path / "owner"), "--trust", str(trusted["vault"])
    )
    kept = vault(
        start,
        served.port,
        "--identity",
        str(tmp_path / "vault"),
        "--trust",
        str(trusted["owner"]),
        *user,
    )
    assert met(served.port, "vault", "owner") and met(kept.port, "user", "vault")
    for name, path in trusted.items():
        copy(folders / f"{name}-2", tmp_path / name, CERTIFICATE, KEY)
        shutil.copy2(folders / f"{name}-2" / CERTIFICATE, path)
    assert eventually(lambda: met(served.port, "vault-2", "owner-2"), END_S)
    assert eventually(lambda: met(kept.port, "user", "vault-2"), END_S)
    assert not met(served.port, "vault", "owner-2") and not met(kept.port, "user", "vault")
    for command in (served.command, kept.command):
        command.until("stderr", "reloaded for new sessions: certificate ")
        command.send(signal.SIGHUP)
        command.until("stderr", "; nothing has changed")
    asked: Command = start(
        "vault",
        "generate",
        "--vault",
        f"127.0.0.1:{kept.port}",
        "--max-new-tokens",
        "4",
        "--tokenizer",
        str(pair.private),
        "--identity",
        str(folders / "user"),
        "--trust",
        str(folders / "vault-2" / CERTIFICATE),
    )
    assert asked.wait(RUN_S) == 0, asked.stderr
