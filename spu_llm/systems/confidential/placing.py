"""Where the user's prompt stands among fakes that somebody else has made: a pseudorandom function
says it (Gim, Li, Zhong, section 3.3), whose key the maker and the user have and nobody else.

The place is the function of the prompt and of how many there are, so the user finds it without
being told. All prompts are in an order that depends on the key and on the user's prompt. Where a
book keeps the fakes of a prompt (`vault open --secrets`), they stand where they stood when it is
asked again, and whoever reads both learns nothing; without one they are drawn anew, and both have
the user's prompt in common. Two prompts that are each other's fakes come in two orders, which says
that they are not the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spu_llm.core.prg import Prg
from spu_llm.systems.confidential.obfuscation import shuffled


def place_of(key: bytes, prompt: str, count: int) -> int:
    """Return the place of the user's prompt among `count`, uniform to whoever lacks the key (32
    bytes).
    """
    return int(Prg(key).child(f"place among {count}: {prompt}").uniform(()) * count)


def placed(key: bytes, prompt: str, rows: Sequence[Any], own: int) -> list[Any]:
    """Return all rows, of which number `own` is the user's: that one in its place, and the others
    around it in a uniform order.
    """
    fakes = [row for i, row in enumerate(rows) if i != own]
    others, _ = shuffled(fakes, Prg(key).child(f"order: {prompt}")) if fakes else ([], 0)
    place = place_of(key, prompt, len(rows))
    return [*others[:place], rows[own], *others[place:]]
