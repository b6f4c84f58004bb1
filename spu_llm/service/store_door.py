"""A worker's door to the object storage of its pool, which its supervisor keeps.

A confined worker has neither the storage's credentials nor its packages. It asks for objects by
name over a socket, and its supervisor fetches, stores and removes them in the folder of this
session's peer, and nowhere else.

    request     {"do": "put" | "get" | "remove", "names": [...], "bytes": [...]}; in a put then the
                object
    answer      {"error": null | "...", "bytes": [...]}, then the objects; null for one not there

JSON after its length, 4 bytes big-endian.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

from spu_llm.core.errors import PoolError
from spu_llm.offline.sealed_objects import AT_ONCE, MAX_OBJECT_BYTES, OBJECT_NAME, ObjectStore

PATIENCE_S = 75.0  # of a worker; the storage has less (`object_store.ANSWER_S`)
_LENGTH = 4
_JSON_BYTES = 1 << 14
_ERROR = 500  # of characters, of an error
_PUT, _GET, _REMOVE = "put", "get", "remove"


class StoreDoor:
    """The supervisor's end: serves one worker from `objects` until it is closed."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._end, self.theirs = socket.socketpair()
        threading.Thread(target=self._serve, name="store-door", daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self.theirs.close()

    def _serve(self) -> None:
        """Answer requests; one that a worker of ours does not make ends it."""
        with self._end, contextlib.suppress(OSError, ValueError, RecursionError):
            while True:
                asked = _receive_json(self._end)
                do, names = _request(asked)
                sizes = _sizes(asked, do, len(names))
                content = [_receive(self._end, size) for size in sizes if do == _PUT]
                try:
                    got = self._done(do, names, sizes, content)
                except PoolError as exc:
                    _send(self._end, {"error": str(exc)[:_ERROR], "bytes": []}, [])
                    continue
                came = [None if data is None else len(data) for data in got]
                _send(self._end, {"error": None, "bytes": came}, [d for d in got if d])

    def _done(
        self, do: str, names: list[str], sizes: list[int], content: list[bytes]
    ) -> list[bytes | None]:
        if do == _GET:
            return self._objects.get(list(zip(names, sizes, strict=True)))
        if do == _PUT:
            self._objects.put(names[0], content[0])
        else:
            self._objects.remove(names)
        return []


class StoreBehindDoor:
    """The worker's end: the `ObjectStore` of its supervisor."""

    def __init__(self, descriptor: int) -> None:
        self._end = socket.socket(fileno=descriptor)
        self._end.settimeout(PATIENCE_S)
        self._lock = threading.Lock()

    def put(self, name: str, data: bytes) -> None:
        """See `ObjectStore.put`."""
        self._ask(_PUT, [name], [len(data)], [data])

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """See `ObjectStore.get`."""
        return self._ask(_GET, [name for name, _ in wanted], [size for _, size in wanted])

    def remove(self, names: Sequence[str]) -> None:
        """See `ObjectStore.remove`."""
        self._ask(_REMOVE, list(names), [])

    def _ask(
        self, do: str, names: list[str], sizes: list[int], content: Sequence[bytes] = ()
    ) -> list[bytes | None]:
        asked = {"do": do, "names": names, "bytes": sizes}
        try:
            with self._lock:
                _send(self._end, asked, content)
                answer = _receive_json(self._end)
                got = [None if n is None else _receive(self._end, n) for n in answer["bytes"]]
        except (OSError, ValueError):
            self._end.close()  # a late answer must not pass for another one
            raise PoolError("object storage of the pool does not answer") from None
        if answer["error"] is not None:
            raise PoolError(answer["error"])
        return got


def _request(asked: Any) -> tuple[str, list[str]]:
    """Return what a worker asks for, and of which objects; ValueError unless ours would."""
    if not isinstance(asked, dict):
        raise ValueError
    do, names = asked.get("do"), asked.get("names")
    most = {_PUT: 1, _REMOVE: AT_ONCE, _GET: AT_ONCE}.get(do, 0) if isinstance(do, str) else 0
    if not isinstance(names, list) or not 1 <= len(names) <= most:
        raise ValueError
    if not all(isinstance(name, str) and OBJECT_NAME.fullmatch(name) for name in names):
        raise ValueError
    if len(set(names)) < len(names):
        raise ValueError
    assert isinstance(do, str)
    return do, names


def _sizes(asked: dict[str, Any], do: str, names: int) -> list[int]:
    """Return the sizes of objects in a request, MAX_OBJECT_BYTES at most in all."""
    sizes = asked.get("bytes")
    if not isinstance(sizes, list) or len(sizes) != (0 if do == _REMOVE else names):
        raise ValueError
    if not all(type(size) is int and size > 0 for size in sizes) or sum(sizes) > MAX_OBJECT_BYTES:
        raise ValueError
    return sizes


def _send(end: socket.socket, words: dict[str, Any], content: Sequence[bytes]) -> None:
    data = json.dumps(words).encode()
    end.sendall(len(data).to_bytes(_LENGTH, "big") + data)
    for piece in content:
        end.sendall(piece)


def _receive_json(end: socket.socket) -> Any:
    length = int.from_bytes(_receive(end, _LENGTH), "big")
    if length > _JSON_BYTES:
        raise ValueError("a long request")
    return json.loads(_receive(end, length))


def _receive(end: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    room = memoryview(data)
    while room:
        got = end.recv_into(room)
        if not got:
            raise OSError("the other end has gone")
        room = room[got:]
    return bytes(data)
