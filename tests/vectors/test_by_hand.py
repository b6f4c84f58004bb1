"""Two ops once more, by Python's integers and nothing of this repository: the files and their
README say enough for another implementation.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
PARTIES = ("client", "provider")
MOD = 1 << 64


def cases(op: str) -> list[Any]:
    return json.loads((FOLDER / f"{op}.json").read_text(encoding="utf-8"))["cases"]


def words(text: str | None) -> list[int]:
    data = bytes.fromhex(text or "")
    return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]


def sent(call: Any, party: str) -> list[bytes]:
    return [bytes.fromhex(m["bytes"]) for m in call["messages"] if m["from"] == party]


def bits_of(data: bytes, count: int) -> list[int]:
    return [data[i // 8] >> i % 8 & 1 for i in range(count)]


@pytest.mark.parametrize("party", PARTIES)
def test_multiply(party: str) -> None:
    """Of integers: e = x - a and f = y - b are opened; x y = e f + e b + f a + a b."""
    call, client = cases("multiply")[0]["calls"][0], party == "client"
    (unit,) = call["correlations"]
    x, y = (words(value[party]) for value in call["inputs"])
    a, b, ab = (words(part[party]) for part in (*unit["masks"], *unit["results"]))
    mine = [(p - q) % MOD for p, q in zip(x + y, a + b, strict=True)]
    assert sent(call, party) == [b"".join(word.to_bytes(8, "little") for word in mine)]
    theirs = words(sent(call, PARTIES[client])[0].hex())
    opened = [(p + q) % MOD for p, q in zip(mine, theirs, strict=True)]
    e, f = opened[: len(x)], opened[len(x) :]
    product = [
        (client * e[i] * f[i] + e[i] * b[i] + f[i] * a[i] + ab[i]) % MOD for i in range(len(x))
    ]
    assert product == words(call["outputs"][0][party])


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("party", PARTIES)
def test_and_bits(party: str, case: int) -> None:
    """With m_i = x_i ^ l_i opened: x_0 x_1 = m_0 m_1 ^ m_0 l_1 ^ m_1 l_0 ^ l_0 l_1. An instance for
    each bit of a word, from the lowest one up; 64 rows a unit.
    """
    call, client = cases("and_bits")[case]["calls"][0], party == "client"
    (unit,) = call["correlations"]
    out = call["outputs"][0]
    n, rows = out["bits"], out["shape"][0]
    groups, size = -(-rows // 64), -(-rows // 8)
    masks, products = words(unit["masks"][2][party]), words(unit["results"][0][party])
    values = []
    for given in call["inputs"]:
        if given["form"] == "private":  # one party's bits are its share, zeros the other's
            values.append(list(bytes.fromhex(given[party] or "00" * rows)))
        else:
            values.append(words(given[party]))

    def plane(value: list[int], bit: int, group: int) -> int:
        some = value[64 * group : 64 * group + 64]
        return sum((word >> bit & 1) << row for row, word in enumerate(some))

    mine = {
        (i, k, g): plane(values[k], i, g) ^ masks[2 * (g * n + i) + k]
        for i, k, g in itertools.product(range(n), (0, 1), range(groups))
    }

    def message(i: int, k: int) -> bytes:
        return b"".join(mine[i, k, g].to_bytes(8, "little") for g in range(groups))[:size]

    order = list(itertools.product(range(n), (0, 1)))
    assert sent(call, party) == [b"".join(message(i, k) for i, k in order)]
    theirs = bits_of(sent(call, PARTIES[client])[0], 8 * size * len(order))
    collected = [0] * rows
    for i, row in itertools.product(range(n), range(rows)):
        g, r = divmod(row, 64)
        m_0, m_1 = (
            mine[i, k, g] >> r & 1 ^ theirs[8 * size * order.index((i, k)) + row] for k in (0, 1)
        )
        at = g * n + i
        l_0, l_1, l_01 = (w >> r & 1 for w in (*masks[2 * at : 2 * at + 2], products[at]))
        collected[row] |= (client & m_0 & m_1 ^ m_0 & l_1 ^ m_1 & l_0 ^ l_01) << i
    assert collected == [word % (1 << n) for word in words(out[party])]
