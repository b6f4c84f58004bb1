"""Seeds that were used before, which must not decide again.

Under one key an n-gram has one number. If it takes part in two choices these depend on each other,
and texts of one key resemble each other more than the model's do (§9.1; two calls agree in .625 of
cases where chance gives .5). What has taken part once, in a candidate that lost too, is left out
from then on: each choice is then made by numbers that nothing before depends on, so that all texts
of a key together have the distribution of the unmarked ones. The price: a text that repeats what
was written before is marked less.

A key's history lies beside it. It holds names of seeds (`keys`), which tell nothing about their
numbers:

    KEYFILE.history    0600: a line of format, the key's fingerprint in it, then 8 bytes a seed
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from spu_llm.systems.watermark.kept import Kept
from spu_llm.systems.watermark.keys import Key

NAME_BYTES = 8


def history_path(key_file: Path) -> Path:
    """Return the history of a key, which is one whatever links lead to the key."""
    key_file = key_file.resolve()
    return key_file.with_name(key_file.name + ".history")


def unpacked(data: bytes) -> set[bytes]:
    """Return the names that lie one after the other; raise ValueError for a part of a name."""
    if len(data) % NAME_BYTES:
        raise ValueError(f"names have {NAME_BYTES} bytes, found {len(data)}")
    return {data[i : i + NAME_BYTES] for i in range(0, len(data), NAME_BYTES)}


def packed(names: Iterable[bytes]) -> bytes:
    """Join names one after the other, as `unpacked` reads them."""
    return b"".join(sorted(names))


class History:
    """The seeds used so far, in memory. `on` False: nothing is kept, as in the paper."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self._used: set[bytes] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._used

    def __len__(self) -> int:
        return len(self._used)

    def add(self, names: Iterable[bytes]) -> None:
        """Count these names as used from now on; durably, before what they chose is seen."""
        if self.on:
            fresh = set(names) - self._used
            self._store(fresh)
            self._used |= fresh

    def packed(self) -> bytes:
        """Return all used names, as a file has them."""
        return packed(self._used)

    @staticmethod
    def of(data: bytes) -> History:
        """Return a history in memory, with the packed names `data` used."""
        history = History()
        history.add(unpacked(data))
        return history

    def _store(self, fresh: set[bytes]) -> None:
        pass


class HistoryFile(History):
    """A history in a file, which one run at a time uses. InputError when it is in use, is of
    another key, or cannot be read or written.
    """

    def __init__(self, path: Path, key: Key) -> None:
        super().__init__()
        header = f"spu-llm watermark history 1 {key.fingerprint().hex()}\n".encode()
        self._file = Kept(path, header, "history")
        whole = len(self._file.rest) - len(self._file.rest) % NAME_BYTES
        if whole < len(self._file.rest):  # what was being written chose nothing yet
            self._file.keep(whole)
        self._used = unpacked(self._file.rest[:whole])

    def _store(self, fresh: set[bytes]) -> None:
        if fresh:
            self._file.append(packed(fresh))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> HistoryFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
