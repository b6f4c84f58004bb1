"""Reading of a request's JSON: each field once, by its type and range, and none that would be
ignored in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spu_llm.core.printable import one_line
from spu_llm.gateway.refusals import Refused

_DEPTH = 32  # of nested values


class Fields:
    """The fields of a JSON object. Each method takes a field out; `end` refuses what is left."""

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self._left, self._place = dict(values), place

    @staticmethod
    def of_body(body: bytes) -> Fields:
        """Parse a request's body. Refused unless it is a JSON object."""
        try:
            values = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused(400, "the body is no JSON") from None
        if not isinstance(values, dict) or _depth(values) > _DEPTH:
            raise Refused(400, "the body is no JSON object of a few levels")
        return Fields(values)

    def has(self, name: str) -> bool:
        """Tell whether a field is there."""
        return self._left.get(name) is not None

    def has_text(self, name: str) -> bool:
        """Tell whether a field is a text."""
        return isinstance(self._left.get(name), str)

    def _taken(self, name: str) -> Any:
        return self._left.pop(name, None)

    def refuse(self, name: str, message: str) -> Refused:
        """Return the refusal of a field."""
        place = one_line(f"{self._place}{name}")[:120]
        return Refused(400, f"{place}: {message}", place)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text; Refused where there is none and no default."""
        value = self._taken(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, "give a text")
        return value

    def whole(self, name: str, least: int, most: int) -> int | None:
        """Return a whole number in a range; None where there is none."""
        value = self._taken(name)
        if value is None:
            return None
        if type(value) is not int or not least <= value <= most:
            raise self.refuse(name, f"give a whole number, {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """Return a number in a range; None where there is none."""
        value = self._taken(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.refuse(name, f"give a number, {least:g} to {most:g}")
        return float(value)

    def switch(self, name: str) -> bool:
        """Return a field that is true or false; false where there is none."""
        value = self._taken(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, "give true or false")
        return bool(value)

    def texts(self, name: str, most: int) -> list[str]:
        """Return a list of texts, or one text as a list."""
        value = self._taken(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if (
            not isinstance(values, list)
            or len(values) > most
            or not all(isinstance(one, str) and one for one in values)
        ):
            raise self.refuse(name, f"give a text, or a list of {most} at most")
        return values

    def objects(self, name: str) -> list[Fields]:
        """Return a list of objects that is not empty."""
        values = self._taken(name)
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(one, dict) for one in values)
        ):
            raise self.refuse(name, "give a list of objects, not an empty one")
        return [Fields(one, f"{self._place}{name}[{i}].") for i, one in enumerate(values)]

    def inner(self, name: str) -> Fields:
        """Return an object; an empty one where there is none."""
        value = self._taken(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "give an object")
        return Fields(value or {}, f"{self._place}{name}.")

    def content(self, name: str, kinds: Sequence[str] = ("text",)) -> str:
        """Return a message's text: one, or parts of the kind text, one after the other."""
        if self.has_text(name):
            return self.text(name)
        parts = self.objects(name)
        texts = []
        for part in parts:
            if (kind := part.text("type")) not in kinds:
                raise self.refuse(name, f"text alone is read here, no {kind[:40]!a}")
            texts.append(part.text("text"))
            part.ignore("cache_control", "annotations", "logprobs")
            part.end()
        return "".join(texts)

    def only(self, name: str, *allowed: Any, why: str) -> None:
        """Refuse a field that has another value than none or these."""
        value = self._taken(name)
        if value is not None and not any(
            type(value) is type(one) and value == one for one in allowed
        ):
            raise self.refuse(name, why)

    def ignore(self, *names: str) -> None:
        """Leave out fields that change no answer."""
        for name in names:
            self._taken(name)

    def end(self) -> None:
        """Refuse what is left."""
        for name, value in self._left.items():
            if value is not None:
                raise self.refuse(name, "this field is not supported here; leave it out")


def _depth(value: Any) -> int:
    """Return how deep values are nested, as far as it matters."""
    level, depth = [value], 0
    while level and depth <= _DEPTH:
        depth += 1
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return depth
