"""Each party alone repeats, byte for byte, what is recorded of every op; README.md has the format.

`python -m tests.vectors` records again.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import itertools
import re
from collections.abc import Iterator
from decimal import Decimal

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from protocols.functions.exponential import FRAC_BITS, SCALE_BITS
from spu_llm.core.correlation import Correlation
from spu_llm.core.values import CLIENT, PROVIDER, ROLES
from tests.vectors.cases import CASES, all_ops
from tests.vectors.encoding import (
    FOLDER,
    FORMAT,
    VERSION_FILE,
    Json,
    files,
    from_hex,
    load,
    path_of,
    text_of,
    version_line,
)
from tests.vectors.meanings import changed
from tests.vectors.recording import record
from tests.vectors.replay import check_results, replay

every_op = pytest.mark.parametrize("op", sorted(CASES))


def test_every_op_has_a_file_and_every_file_an_op() -> None:
    assert set(all_ops()) == set(CASES) == {path.stem for path in files()}
    assert sum(path.stat().st_size for path in files()) < 1_000_000  # room for more ops


def test_the_version_of_protocols_was_thought_of() -> None:
    """Whoever changes what is recorded decides whether VERSION in protocols/__init__.py must rise;
    `python -m tests.vectors` then writes the file.
    """
    assert VERSION_FILE.read_text(encoding="utf-8") == version_line()


def test_every_op_under_contract_is_among_them() -> None:
    """`op = ...` in classes that inherit a contract, but for ops that a test file makes itself."""
    if not (FOLDER.parent / "core" / "test_contract.py").exists():
        pytest.skip("Bazel gives a test no other test's file")
    under: set[str] = set()
    for path in FOLDER.parent.rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        contracts = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and any(ast.unparse(base).endswith("Contract") for base in node.bases)
        ]
        under |= {name.split(".")[-1] for c in contracts for name in _assigned(c, "op")}
        under -= {name for name in under if _assigned(tree, name)}
    assert under == set(CASES)


def _assigned(body: ast.Module | ast.ClassDef, name: str) -> list[str]:
    """Return what is assigned to a name there."""
    return [
        ast.unparse(x.value)
        for x in body.body
        if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == name
    ]


@every_op
def test_each_party_alone_repeats_its_half(op: str) -> None:
    recorded = load(op)
    assert (recorded["format"], recorded["op"]) == (FORMAT, op)
    for case in recorded["cases"]:
        assert case["calls"][-1]["op"] == op
        for rank in (CLIENT, PROVIDER):
            replay(case, rank)


@every_op
def test_results_are_the_reference(op: str) -> None:
    for case in load(op)["cases"]:
        assert check_results(case) >= len(case["calls"])


@every_op
def test_recording_again_changes_nothing(op: str) -> None:
    """Else a case, an op's own randomness or what it sends has changed: record it again."""
    assert path_of(op).read_text(encoding="utf-8") == text_of(record(op))


def test_a_name_has_one_meaning_in_all_ops() -> None:
    """Batches on disk are found by the name of their correlation."""
    taken: dict[str, Correlation] = {}
    for op in CASES:
        record(op, taken)
    assert changed(map(load, CASES), taken) == [] and len(taken) > 20


def test_another_meaning_under_a_name_is_noticed() -> None:
    taken: dict[str, Correlation] = {}
    recorded = [record(op, taken) for op in ("multiply", "field_square", "mux")]
    for name, correlation in taken.items():
        others = [
            dataclasses.replace(
                correlation, secure=lambda *x, c=correlation: [y + 1 for y in c.secure(*x)]
            ),
            dataclasses.replace(correlation, results=correlation.results * 2),
        ]
        for other in others:
            assert changed(recorded, {name: other}) == [name]


def _places(case: Json) -> Iterator[tuple[int, Json, str]]:
    """Yield (rank, where, field) of all that a party has to repeat: messages, units and results."""
    for call in case["calls"]:
        for message in call["messages"]:
            yield ROLES.index(message["from"]), message, "bytes"
        parts = [p for unit in call["correlations"] for p in (*unit["masks"], *unit["results"])]
        for part in (*parts, *call["outputs"]):
            yield from ((rank, part, role) for rank, role in enumerate(ROLES) if part[role])


def _flipped(text: str) -> str:
    """Return the lowest bit of the first byte: it counts in every word, plane and plaintext."""
    return f"{int(text[:2], 16) ^ 1:02x}{text[2:]}"


@every_op
def test_a_flipped_bit_is_noticed(op: str) -> None:
    tried = 0
    for case in copy.deepcopy(load(op)["cases"]):
        for rank, where, name in _places(case):
            intact, where[name] = where[name], _flipped(where[name])
            with pytest.raises(AssertionError):
                replay(case, rank)
            where[name] = intact
            tried += 1
        replay(case, CLIENT)
    assert tried >= 2


def test_a_wrong_result_that_both_agree_on_is_noticed() -> None:
    case = copy.deepcopy(load("multiply")["cases"][0])
    share = case["calls"][0]["outputs"][0]
    share["client"] = _flipped(share["client"])
    with pytest.raises(AssertionError, match="off by 1 units"):
        check_results(case)


@pytest.mark.parametrize("op", ["times_rows", "times_columns"])
def test_rows_of_a_cache_are_opened_once(op: str) -> None:
    """In the sequence, later products take no tile and open one row each, beside the queries."""
    (case,) = (c for c in load(op)["cases"] if c["name"] == "rows already open")
    products = [call for call in case["calls"] if call["op"] == op]
    taken = [" ".join(unit["name"] for unit in call["correlations"]) for call in products]
    assert ["cached" in names for names in taken] == [True, False, False]
    heads = products[0]["inputs"][0]["shape"][0]
    depth = case["calls"][0]["inputs"][0]["shape"][2]
    slots = int(products[0]["correlations"][0]["name"].split()[-2])
    width = slots if op == "times_columns" else depth
    for call, new in zip(products, (3, 1, 1), strict=True):
        queries = call["inputs"][0]["shape"][1]
        first = call["messages"][0]
        assert len(first["bytes"]) == 16 * heads * (queries * width + new * depth)


@pytest.mark.parametrize("op", ["times_rows", "times_columns"])
def test_the_provider_opens_no_queries(op: str) -> None:
    """Of rows that it knows it sends f alone, once for each unit of two queries."""
    (case,) = (c for c in load(op)["cases"] if c["name"] == "the provider's rows")
    size = len(bytes.fromhex(case["calls"][0]["inputs"][0]["provider"])) * 2  # words of float32
    products = [call for call in case["calls"] if call["op"] == op]
    for call, units in zip(products, (1, 1, 0), strict=True):
        first = [m for m in call["messages"] if m["round"] == 1]
        queries = call["inputs"][0]["client"]
        sent = {m["from"]: len(m["bytes"]) for m in reversed(first)}
        assert sent["client"] == len(queries)
        assert sent.get("provider", 0) == 2 * size * units


def test_streams_are_what_the_readme_says() -> None:
    """By single blocks of AES, for words of the parties' own streams and of the common one."""
    seen = 0
    for op in ("project", "select", "toy_reshare"):
        case = load(op)["cases"][0]
        for name, drawn in case["calls"][0]["drawn"].items():
            block = Cipher(algorithms.AES(bytes.fromhex(case["keys"][name])), modes.ECB())
            counters = range(-(-len(drawn) // 32))
            data = b"".join(i.to_bytes(16, "big") for i in counters)
            assert block.encryptor().update(data).hex()[: len(drawn)] == drawn
            seen += bool(drawn)
    assert seen == 5


def _distance_from_a_tie(x: Decimal) -> Decimal:
    return abs(x - int(x) - Decimal("0.5"))


def test_exponentials_do_not_hang_on_the_last_bit_of_a_double() -> None:
    """The factors of `cut_exponential` are exp in doubles, which differ between machines by a unit
    in the last place: all that are recorded round the same way.
    """
    reach = 1 << 26
    seen = 0
    for case in load("cut_exponential")["cases"]:
        x = case["calls"][0]["inputs"][0]
        for role in ROLES:
            n = -from_hex(x[role], np.uint64, x["shape"]) * np.uint64(19) & np.uint64(2 * reach - 1)
            for word in n.tolist():
                top, rest = divmod(word, reach)
                starts, bits = [0], [SCALE_BITS]
                if role != "client":
                    starts, bits = [top, 1 - top], [SCALE_BITS // 2, 0]
                for start, kept in itertools.product(starts, bits):
                    nats = Decimal(start * reach - rest) / (19 * 2**FRAC_BITS)
                    # 39 bits of at most 53, so a unit in the last place is 2^-14 or less.
                    assert _distance_from_a_tie(nats.exp() * 2**kept) > Decimal(2) ** -8
                    seen += 1
    assert seen > 30


def test_the_readme_explains_every_correlation() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    taken = {
        unit["name"]
        for path in files()
        for case in load(path.stem)["cases"]
        for call in case["calls"]
        for unit in call["correlations"]
    }
    names = {name: [kind for kind in explained if name.startswith(kind)] for name in taken}
    assert all(len(kinds) == 1 for kinds in names.values()), names
    assert {kind for (kind,) in names.values()} == set(explained)
