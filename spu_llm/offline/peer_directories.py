"""A party's pool directory: one folder of correlated randomness for each other party it has
sessions with.

    <directory>/id         32 hex digits, drawn once: a secret, never sent
    <directory>/<name>/    the pool that it shares with one peer (spu_llm.offline.files)
    <directory>/certificate-<32 hex digits of its fingerprint>/   a directory like this one, of a
                               provider for one certificate
    <directory>/store-url      where results of batches are, if not here (offline.object_store)
    <directory>/wanted, making a client's locks: who goes first (spu_llm.offline.priority_lock)

Correlated randomness serves the two parties that made it, nobody else, and a session that meets
other batches at its peer drops its own: without a folder for each, one client would cost all others
their correlated randomness. Each tells the other an id, with the settings of a session, so that a
supervisor can give its worker one folder alone, and again over the sealed channel. By it a party
that comes again with the same directory is recognised. An id follows from the secret and from both
certificates: to another peer, or under another certificate of its own, a party has another one, and
nothing tells that the two are the same party's. The name of a peer's folder follows from its id in
the same way, so a peer that tells one id under two certificates finds two folders. Who knows
another one's id can waste what that one has made, never learn from it.
"""

from __future__ import annotations

import hmac
import os
import re
from pathlib import Path

from spu_llm.core.channel import Channel
from spu_llm.core.errors import PoolError, WireError
from spu_llm.core.values import ROLES
from spu_llm.offline.access import check, failures
from spu_llm.offline.durable import drawn_once, open_folder

MAX_PEERS = 64  # parties that one directory has correlated randomness for
CERTIFIED = "certificate-"
_ID = re.compile(rb"[0-9a-f]{32}")


def open_directory(directory: Path) -> bytes:
    """Return the secret of a party's pool directory, which is made if need be.

    PoolError when the directory is not this user's alone or cannot be used.
    """
    path = directory / "id"
    open_folder(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PoolError(f"{directory} cannot be written to; use another directory")
    secret = drawn_once(path, os.urandom(16).hex().encode())
    if not _ID.fullmatch(secret):
        raise PoolError(f"{path} is damaged; remove it and all correlated randomness beside it")
    return secret


def party_directories(directory: Path) -> list[Path]:
    """Return the parties' directories in what a user calls a pool: itself, and, where both parties
    are on one machine, a folder of each in it, or a provider's of its certified clients. Empty for
    any other path. Changes nothing.
    """
    with failures(directory):
        certified = sorted(directory.glob(f"{CERTIFIED}*")) if directory.is_dir() else []
    candidates = (directory, *(directory / role for role in ROLES), *certified)
    return [path for path in candidates if _has_id(path)]


def directory_of(directory: Path, fingerprint: str) -> Path:
    """Return a provider's party directory for all that one certificate's owner comes with: what it
    takes is counted apart, and nobody else can fill its places.
    """
    return directory / f"{CERTIFIED}{fingerprint[:32]}"


def peer_folders(directory: Path) -> list[Path]:
    """Return the folders of a party's peers. Changes nothing."""
    with failures(directory):
        check(directory, folder=True)
        return sorted(path for path in directory.iterdir() if _is_peers(path))


def agree(channel: Channel, directory: Path | None, pair: str = "") -> Path | None:
    """Return the folder for the peer on this channel, or None when either keeps no correlated
    randomness. `pair`: both parties' certificates, the same at both; empty in the clear.

    One message each. WireError on anything but an id; PoolError when the directory cannot be used
    or is full of other peers.
    """
    own_id = id_in(directory, pair) if directory is not None else b""
    channel.send(own_id)
    peer_id = channel.recv()
    if peer_id and not _ID.fullmatch(peer_id):
        raise WireError("the peer names itself by something that is no id")
    return None if directory is None or not peer_id else folder_of(directory, peer_id, pair)


def check_met(channel: Channel, own_id: bytes, peer_id: bytes) -> None:
    """Send the own id and check the peer's where both are known already; the id of a party that
    keeps no correlated randomness is empty. WireError when the peer sends another one.
    """
    channel.send(own_id)
    if channel.recv() != peer_id:
        raise WireError("the peer names itself otherwise than was agreed on")


def id_in(directory: Path, pair: str) -> bytes:
    """Return the id of the party that has `directory`, for its peer of this `pair`. PoolError when
    the directory cannot be used.
    """
    return _derived(open_directory(directory), pair)


def folder_of(directory: Path, peer_id: bytes, pair: str) -> Path:
    """Return the folder for a peer, which need not be there. WireError when it names itself by
    something that is no id; PoolError when the directory cannot be used or is full of other peers.
    """
    if not _ID.fullmatch(peer_id):
        raise WireError("the peer names itself by something that is no id")
    secret = open_directory(directory)
    if peer_id == _derived(secret, pair):
        raise PoolError(f"both parties use {directory}, or copies of it; give each its own")
    folder = directory / _derived(secret, f"{pair} {peer_id.decode()}").decode()
    if not folder.exists():
        with failures(directory):
            peers = sum(map(_has_correlations, directory.iterdir()))
        if peers >= MAX_PEERS:
            raise PoolError(
                f"{directory} has correlated randomness for {peers} parties already; remove the "
                "folders of those that do not come again"
            )
    return folder


def _derived(secret: bytes, name: str) -> bytes:
    """Return 32 hex digits that only `secret` gives for `name`."""
    return hmac.new(secret, name.encode(), "sha256").hexdigest()[:32].encode()


def _has_correlations(folder: Path) -> bool:
    """Return whether `folder` is a peer's and holds more than its lock: ids cost a peer nothing."""
    return _is_peers(folder) and any(entry.name != "lock" for entry in folder.iterdir())


def _is_peers(folder: Path) -> bool:
    return _ID.fullmatch(os.fsencode(folder.name)) is not None


def _has_id(directory: Path) -> bool:
    path = directory / "id"
    with failures(path):
        return path.is_file() and _ID.fullmatch(path.read_bytes()) is not None
