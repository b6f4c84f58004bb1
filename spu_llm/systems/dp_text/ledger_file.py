"""A corpus as it is written, and beside it the account of what was spent for it.

    FILE              a text a line, in the order in which they are begun
    FILE.ledger       0600, the curator's own: the run's parameters, how many texts were *begun*,
                      what that spent, and while some are being made the key of their randomness

A text is entered as begun, durably, before its first token is drawn, so that what was spent is
never more than what the ledger says, wherever the process is killed. A run that goes on makes a
text that was begun and is not in FILE again with the same key: the same draws on the same
references, the same text, nothing more to learn from, and so not spent a second time. Texts that
are made together have one key, and are made together again. The key is wiped once they are
durable. FILE is locked as long as a run writes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spu_llm.core.errors import InputError
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.offline.durable import replace_whole

FORMAT = 1
# How texts come of a key: one that was begun is made again only where that is the same.
DRAWS = 2


def ledger_path(out: Path) -> Path:
    return out.with_name(out.name + ".ledger")


class CorpusFile:
    """FILE and its ledger, opened by `opened`. `done` texts are in FILE, `begun` are spent."""

    def __init__(self, out: Path, descriptor: int, state: dict[str, Any]) -> None:
        self._out, self._descriptor, self._state = out, descriptor, state
        self.done = self._count()
        within = state["begun"] - state["count"] <= self.done <= state["begun"]
        if not within or (self.done < state["begun"] and state["key"] is None):
            raise InputError(
                f"{out} has {self.done} texts, and its ledger says that {state['begun']} were "
                "begun: it was changed; give another --out (what was spent stays spent)"
            )
        if self.done == self.begun and state["key"] is not None:
            self._wipe()

    @property
    def begun(self) -> int:
        return int(self._state["begun"])

    @property
    def under_way(self) -> range:
        """Return the numbers of the texts that were begun and are not all in FILE."""
        first = self.begun - int(self._state["count"])
        return range(first, self.begun) if self.done < self.begun else range(0)

    def begin(self, count: int = 1) -> Prg:
        """Return the randomness of the next `count` texts, which are spent from now on; of those
        that a run before began, if there are any. InputError where that was of a version that draws
        otherwise, unless `count` is 0.
        """
        if self.done < self.begun:
            if count and self._state.get("draws") != DRAWS:
                raise InputError(
                    f"{self._out} was interrupted in a version that draws otherwise, so that its "
                    "text cannot be made again; give another --out (what was spent stays spent)"
                )
            return Prg(bytes.fromhex(self._state["key"]))
        key = os.urandom(KEY_BYTES)
        # Of each reference once, in its batch: as much after the first text as after the last.
        spent = self._state["spends"]
        begun = self.done + count
        self._state.update(begun=begun, count=count, key=key.hex(), draws=DRAWS, spent=spent)
        self._record()
        return Prg(key)

    def add(self, texts: Iterable[dict[str, Any]]) -> None:
        """Write what came of `begin`; what is there already stays."""
        first = self.begun - self._state["count"]
        lines = [json.dumps(text, ensure_ascii=True) + "\n" for text in texts]
        for line in lines[self.done - first :]:
            self._append(line.encode())
            self.done += 1
        self._wipe()

    def _append(self, data: bytes) -> None:
        with _failures(self._out):
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)

    def _wipe(self) -> None:
        self._state["key"] = None
        self._record()

    def _record(self) -> None:
        data = (json.dumps(self._state, indent=1) + "\n").encode()
        with _failures(self._out):
            # The lock is on FILE: under another name, it keeps nobody from this ledger.
            if not os.path.samestat(os.stat(self._out), os.fstat(self._descriptor)):
                raise InputError(f"{self._out} was replaced while it was being written")
            replace_whole(ledger_path(self._out), data)

    def _count(self) -> int:
        """Count the whole lines in FILE; a torn one at its end is cut off."""
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._descriptor, whole)
        return data.count(b"\n")


@contextmanager
def opened(
    out: Path, run: dict[str, Any], references: Sequence[str], spends: dict[str, Any]
) -> Iterator[CorpusFile]:
    """Yield the corpus file of this run, which may go on with what an earlier one began. `run`: all
    that the texts' distribution depends on, public, as JSON has it; `spends`: what a reference is
    charged once its text was begun. InputError when FILE is in use, was begun with something else,
    or cannot be written.
    """
    with _failures(out):
        descriptor = os.open(out, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InputError(f"--out: {out} is no plain file; give the name of one")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{out} is being written by another run") from None
        yield CorpusFile(out, descriptor, _state(out, descriptor, run, references, spends))
    finally:
        os.close(descriptor)


@contextmanager
def _failures(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        path = exc.filename or out
        raise InputError(f"--out: cannot write {path}: {exc.strerror}; choose another") from None


def write(
    file: CorpusFile,
    wanted: int,
    make: Callable[[range, Prg], Iterable[dict[str, Any]]],
    together: Callable[[int], int] = lambda number: 1,
    on_text: Callable[[int], None] = lambda done: None,
) -> None:
    """Write all texts from `file.done` on: make(numbers, randomness) gives some, as many together
    as `together` says of the first one's number.
    """
    on_text(file.done)
    while file.done < wanted:
        numbers = file.under_way or range(file.done, file.done + together(file.done))
        prg = file.begin(len(numbers))
        file.add(make(numbers, prg))
        on_text(file.done)


def _state(
    out: Path,
    descriptor: int,
    run: dict[str, Any],
    references: Sequence[str],
    spends: dict[str, Any],
) -> dict[str, Any]:
    """Return what the ledger says; the state of a new run where there is none."""
    path = ledger_path(out)
    if not path.exists():
        if os.fstat(descriptor).st_size:
            raise InputError(f"{out} is there already, without a ledger; give another --out")
        salt = os.urandom(16)
        return {
            "format": FORMAT,
            "run": run,
            "salt": salt.hex(),
            "references": _digest(salt, references),
            "begun": 0,
            "count": 0,
            "key": None,
            "spends": spends,
            "spent": None,
        }
    try:
        state = json.loads(path.read_text())
        salt, before = bytes.fromhex(state["salt"]), state["run"]
        known = state["format"] == FORMAT and type(state["begun"]) is type(state["count"]) is int
        known = known and (state["key"] is None or len(bytes.fromhex(state["key"])) == KEY_BYTES)
        known = known and isinstance(before, dict) and isinstance(state["references"], str)
        known = known and {"spends", "spent"} <= state.keys()
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise InputError(f"{path} cannot be read; what it accounts for would be lost: restore it")
    for name in sorted({*run, *before}):
        if run.get(name) != before.get(name):
            raise InputError(
                f"{out} was begun with {name} {before.get(name)!r}, not {run.get(name)!r}; repeat "
                "the command as it was, or give another --out (which is spent anew)"
            )
    if state["spends"] != spends:
        raise InputError(f"{path} says another price than this version; give another --out")
    if state["references"] != _digest(salt, references):
        raise InputError(f"{out} was begun with other references; give another --out")
    return dict(state)


def _digest(salt: bytes, references: Sequence[str]) -> str:
    """Return a salted digest of the references: a plain one would let guess them."""
    digest = hashlib.blake2b(key=salt, digest_size=32)
    for text in references:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
