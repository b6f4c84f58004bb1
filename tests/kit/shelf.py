"""Object storage in memory."""

from __future__ import annotations

from collections.abc import Sequence

from spu_llm.core.errors import PoolError


class Shelf:
    """Object storage in memory, which keeps a copy of all that it ever had."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.copies: dict[str, bytes] = {}
        self.gets: list[int] = []
        self.down = False

    def put(self, name: str, data: bytes) -> None:
        self._answer()
        self.objects[name] = self.copies[name] = data

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        self._answer()
        self.gets.append(len(wanted))
        actual = [self.objects.get(name) for name, _ in wanted]
        return [one and one[: size + 1] for one, (_, size) in zip(actual, wanted, strict=True)]

    def remove(self, names: Sequence[str]) -> None:
        self._answer()
        for name in names:
            self.objects.pop(name, None)

    def _answer(self) -> None:
        if self.down:
            raise PoolError("object storage is down")
