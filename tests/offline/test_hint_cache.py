"""A client's hints of several providers: who hears of them, and what they may take together."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spu_llm.core.errors import InputError, PoolError, WorkerError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline.durable import open_folder
from spu_llm.offline.silent import store
from spu_llm.offline.silent.cache import INSECURE, HintCache, peer_folder
from spu_llm.offline.silent.ring import N
from spu_llm.service.hint_room import HintRoom
from spu_llm.service.worker import HINTS_RECEIVED, HINTS_WANTED
from tests.offline.silent_pair import Two, correlation_of, fixed, looks_uniform, matrix

MATRIX, WEIGHTS = correlation_of(2, 5), matrix(1, 2, 5)
SIZE = 5 * 5 * N
ONE, OTHER = "1" * 32, "2" * 32  # providers' folders


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "client"
    open_folder(folder)
    return folder


def a_file(folder: Path, name: str, size: int, age: int) -> Path:
    """Put a file in the cache that was used `age` seconds before the others of age 0."""
    open_folder(folder)
    path = folder / name
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    os.utime(path, (10**9 - age, 10**9 - age))
    return path


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file() and path.name != "lock")


def receives(folder: Path, most: int, *sizes: int) -> bool:
    """Return whether hints of these sizes may be kept."""
    wanted = [(f"{number:064x}", size) for number, size in enumerate(sizes)]
    with HintCache(folder, most).receiving(wanted) as keep:
        return keep


# ---- of whom


def test_each_pair_of_certificates_has_a_folder(root: Path) -> None:
    pairs = ["client one", "client two", "other one", ""]
    folders = [peer_folder(root, pair) for pair in pairs]
    assert len(set(folders)) == 4 and folders[-1] == root / INSECURE
    assert all(folder.parent == root and folder.name.isalnum() for folder in folders)
    assert folders == [peer_folder(root, pair) for pair in pairs]


def test_a_provider_cannot_ask_for_another_ones_hints(root: Path, tmp_path: Path) -> None:
    """It offers the very hint, digest and all, and hears that the client lacks it."""
    provider = tmp_path / "provider" / "version"
    Two(root / ONE, provider).set_up((MATRIX, WEIGHTS))
    again, other = Two(root / ONE, provider), Two(root / OTHER, provider)
    for two in (again, other):
        two.set_up((MATRIX, WEIGHTS))
    assert again.wires[PROVIDER].sent[0] == other.wires[PROVIDER].sent[0]
    assert again.wires[CLIENT].sent[0] == SIZE.to_bytes(8, "little")
    assert other.wires[CLIENT].sent[0] == bytes(8)


# ---- versions


def test_versions_of_a_model_share_nothing_that_a_client_sees(root: Path, tmp_path: Path) -> None:
    """One matrix in two versions: other digests, and contents of which neither tells the other."""
    folders = [store.version_folder(tmp_path, served) for served in ("one", "two", "one")]
    assert folders[0] == folders[2] != folders[1]
    digests, contents = [], []
    for folder in folders:
        open_folder(folder)
        two = Two(root / ONE, folder)
        two.set_up((MATRIX, WEIGHTS))
        digests.append(two.wires[PROVIDER].sent[0])
        contents.append(two.products[CLIENT]._uses[MATRIX.name].hint)
    assert digests[0] == digests[2] != digests[1]
    assert looks_uniform(contents[0] - contents[1]) and looks_uniform(contents[0] ^ contents[1])
    keys = [(folder / "key").read_bytes() for folder in folders[:2]]
    assert keys[0] != keys[1]


# ---- the bound


def test_a_hint_that_cannot_be_kept_is_not_sent(root: Path, tmp_path: Path) -> None:
    two = Two(root / ONE, tmp_path / "version", most_bytes=SIZE - 1)
    client, _ = two.outcomes(lambda rank, p: p.set_up([(MATRIX, fixed(rank, WEIGHTS))]))
    assert isinstance(client, InputError) and "give --hint-cache 1 or more" in str(client)
    assert "\n" not in str(client)
    assert two.sent(PROVIDER) == [32] and not names(root)
    two = Two(root / ONE, tmp_path / "version", most_bytes=SIZE)
    two.set_up((MATRIX, WEIGHTS))
    assert len(names(root)) == 1


def test_all_hints_of_a_session_count(root: Path) -> None:
    """Also those of an earlier call, and equal names: a provider may say one digest for all."""
    cache = HintCache(root / ONE, 3_000_000)
    with cache.receiving([("a" * 64, 1_500_000)]) as keep:
        assert keep
    with pytest.raises(InputError, match="take 4 MB, but all hints together may take 3 MB"):
        with cache.receiving([("a" * 64, 1_500_001)]):
            pass
    assert receives(root / ONE, 3_000_000, 3_000_000)


def test_what_was_used_longest_ago_goes_first(root: Path) -> None:
    """Of any provider, half received or whole, and no more than need be."""
    for folder, name, age in (
        (ONE, "a.hint", 1),
        (OTHER, "b.part", 3),
        (OTHER, "c.hint", 2),
        (INSECURE, "d.hint", 4),
    ):
        a_file(root / folder, name, 100, age)
    assert receives(root / ONE, 450, 50) and names(root) == ["a.hint", "b.part", "c.hint", "d.hint"]
    assert receives(root / ONE, 449, 50) and names(root) == ["a.hint", "b.part", "c.hint"]
    assert receives(root / ONE, 300, 50, 51) and names(root) == ["a.hint"]
    assert receives(root / ONE, 99, 1) and names(root) == []


def test_what_is_there_is_used_and_need_not_fit_again(root: Path) -> None:
    own = [f"{number:064x}" for number in range(2)]
    whole = a_file(root / ONE, f"{own[0]}.hint", 100, 9)
    part = a_file(root / ONE, f"{own[1]}.part", 60, 9)
    same = a_file(root / OTHER, f"{own[0]}.hint", 100, 8)  # another provider's
    last = a_file(root / OTHER, "last.hint", 100, 1)
    assert receives(root / ONE, 400, 100, 100) and same.exists()
    assert receives(root / ONE, 399, 100, 100)
    assert whole.exists() and part.exists() and last.exists() and not same.exists()
    assert whole.stat().st_mtime > 10**9  # used now: others go before it
    assert receives(root / OTHER, 200, 40) and not last.exists() and whole.exists()


def test_what_a_session_uses_is_never_removed(root: Path, tmp_path: Path) -> None:
    """Another session has no room, holds its hints in memory, and gets room when the first ends."""
    provider, most = tmp_path / "version", 2 * SIZE - 1
    first = Two(root / ONE, provider)
    first.set_up((MATRIX, WEIGHTS))
    (kept,) = names(root)
    other = matrix(2, 2, 5)
    second = Two(root / OTHER, tmp_path / "another", most_bytes=most)
    assert np.abs(second.errors(MATRIX, 3, other)).max() < 2**36
    assert names(root) == [kept]
    assert np.abs(first.errors(MATRIX, 3, WEIGHTS)).max() < 2**36
    del first
    gc.collect()
    third = Two(root / OTHER, tmp_path / "another", most_bytes=most)
    third.set_up((MATRIX, other))
    assert len(names(root)) == 1 and names(root) != [kept]


def test_a_file_that_cannot_be_opened_goes_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one worker could keep all providers' hints out."""
    closed = a_file(root / OTHER, "closed.hint", 100, 1)
    opened = os.open

    def refused(path: Any, *more: Any) -> int:
        if path == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *more)

    monkeypatch.setattr(os, "open", refused)
    assert receives(root / ONE, 150, 100) and not closed.exists()


def test_another_process_uses_a_hint(root: Path) -> None:
    content = b"x" * 100
    digest = store._sha256(np.frombuffer(content, np.uint8))
    path = a_file(root / ONE, f"{digest.hex()}.hint", 0, 0)
    path.write_bytes(content)
    code = (
        "import sys; from pathlib import Path; from spu_llm.offline.silent.store import Received\n"
        "hint = Received(Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), 100, keep=False)\n"
        "print(hint.finish().size, flush=True); sys.stdin.read()"
    )
    using = subprocess.Popen(
        [sys.executable, "-c", code, str(path.parent), digest.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    try:
        assert using.stdout is not None and using.stdout.readline() == b"100\n"
        assert not receives(root / OTHER, 150, 100) and path.exists()
    finally:
        using.kill()
        using.communicate()
    assert receives(root / OTHER, 150, 100) and not path.exists()


def test_a_hint_that_is_removed_while_it_is_opened_is_fetched(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = tmp_path / "version"
    Two(root / ONE, provider).set_up((MATRIX, WEIGHTS))
    (kept,) = (root / ONE).iterdir()
    lock, removed = fcntl.flock, []

    def removed_before(number: Any, kind: int) -> None:
        if kind == fcntl.LOCK_SH and not removed:
            removed.append(kept)
            kept.unlink()
        lock(number, kind)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    two = Two(root / ONE, provider)
    assert np.abs(two.errors(MATRIX, 3, WEIGHTS)).max() < 2**36
    assert two.wires[CLIENT].sent[0] == bytes(8)


def test_one_session_of_all_receives(root: Path) -> None:
    """So that none grows while another one makes room; what ends with an error lets go, too."""
    old = a_file(root / OTHER, "old.hint", 100, 1)
    with HintCache(root / ONE, 150).receiving([("a" * 64, 50)]) as keep:
        assert keep and not receives(root / OTHER, 1, 1)
        assert old.exists()  # who may not write removes nothing
    with pytest.raises(PoolError), HintCache(root / ONE, 150).receiving([("a" * 64, 50)]) as keep:
        assert keep
        raise PoolError("the peer is gone")
    assert receives(root / ONE, 150, 50)


def test_a_folder_that_cannot_be_used_bounds_memory(root: Path) -> None:
    root.chmod(0o755)
    assert not receives(root / ONE, 100, 100)
    with pytest.raises(InputError, match="--hint-cache"):
        receives(root / ONE, 100, 101)


def test_other_layouts_leave_nothing(root: Path, tmp_path: Path) -> None:
    """Gigabytes, and the provider's one key for all its models."""
    older = [f"{'a' * 64}.hint", f"{'b' * 64}.part", f".{'c' * 64}.hint.{'d' * 16}"]
    provider = tmp_path / "provider"
    open_folder(provider)
    for folder, more in ((root, []), (provider, ["key"])):
        for name in (*older, *more, "notes"):
            (folder / name).write_bytes(b"x")
    kept = a_file(root / ONE, f"{'a' * 64}.hint", 1, 0)
    own = a_file(store.version_folder(provider, "model"), "key", 32, 0)
    store.version_folder(provider, "model")
    assert receives(root / OTHER, 100, 1)
    assert names(root) == sorted([kept.name, "notes"]) and names(provider) == ["key", "notes"]
    assert own.exists()
    assert store.version_folder(tmp_path / "nowhere", "model").parent == tmp_path / "nowhere"


# ---- the supervisor answers


class Worker:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def tell(self, **said: Any) -> None:
        self.heard.append(said["answer"])


def asked(*hints: Any) -> dict[str, Any]:
    return {"event": HINTS_WANTED, "hints": list(hints)}


def test_a_worker_is_answered(root: Path) -> None:
    worker: Any = Worker()
    room = HintRoom(HintCache(root / ONE, 1000), worker)
    assert not room.heard({"event": "stage", "name": "x"}) and not worker.heard
    assert room.heard(asked(["a" * 64, 900])) and worker.heard == [True]
    assert not receives(root / OTHER, 1000, 1)  # it receives
    assert room.heard({"event": HINTS_RECEIVED}) and receives(root / OTHER, 1000, 1)
    with pytest.raises(InputError, match="--hint-cache"):
        room.heard(asked(["b" * 64, 101]))
    assert worker.heard == [True] and receives(root / OTHER, 1000, 1)
    ends = HintRoom(HintCache(root / ONE, 1000), worker)
    ends.heard(asked(["a" * 64, 900]))
    ends.close()  # with the session, however it ends
    assert receives(root / OTHER, 1000, 1)


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {},
        ["a"],
        [["a"]],
        [["a", 0]],
        [["a", -1]],
        [["a", True]],
        [["a", "1"]],
        [[1, 1]],
        [["a", 1], ["a", 1.5]],
    ],
)
def test_a_worker_that_asks_for_nonsense_ends(root: Path, told: Any) -> None:
    worker: Any = Worker()
    with pytest.raises(WorkerError, match="asks for hints that are none"):
        HintRoom(HintCache(root / ONE), worker).heard({"event": HINTS_WANTED, "hints": told})
    assert not worker.heard


@pytest.mark.parametrize("name", ["../" + OTHER + "/x", "/etc/passwd", "x" * 5000, "\0"])
def test_names_of_a_worker_lead_nowhere(root: Path, name: str) -> None:
    theirs = a_file(root / OTHER, "x.hint", 10, 5)
    worker: Any = Worker()
    assert HintRoom(HintCache(root / ONE, 1000), worker).heard(asked([name, 10]))
    assert worker.heard == [True] and theirs.stat().st_mtime < 10**9
