"""The exact figures where documents state them: cells of tables, compared with the code.

A table that has some stands under a comment `<!-- exact: NAME -->`. Its rows are known by their
first cell, or by their first two joined by ", ", its columns by their heads, both without markup.
Cells that are not listed here are other people's: measured, or words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from experiments.common.kinds import KINDS
from experiments.common.report import both_ways, bytes_text
from spu_llm.core.errors import InputError

ROOT = Path(__file__).parents[2]
DOCUMENTS = (*sorted((ROOT / "docs" / "results").glob("*.md")), ROOT / "protocols" / "README.md")
COMMAND = "spu-llm experiment exact --write"
_PARTS = ("ops",)  # tables that show some of the rows
MARK = "<!-- exact: {} -->"
_MARK = re.compile(MARK.format("(.+)") + "$")

WAYS = {"with_one_maximum": "one maximum", "with_own_maxima": "a maximum per block, merged"}

DIRECTIONS = ("bytes, client to provider", "bytes, provider to client")

Cells = Mapping[str, Mapping[str, Mapping[str, str]]]  # by table, row, column


# Of functions of one size: how tables in docs/results and of protocols/README.md call them, and the
# case of `bench op`.
FUNCTIONS = (
    ("GELU, 6 thresholds (1,024 values)", "gelu", ("gelu", 1024)),
    ("SiLU, 6 thresholds (1,024)", "silu", ("silu", 1024)),
    ("reciprocal over 2^10 (256)", "reciprocal, rsqrt over 2^10", ("reciprocal", 256)),
    ("rsqrt over 2^10 (256)", "reciprocal, rsqrt over 2^10", ("rsqrt", 256)),
    ("rms_norm, 256 wide (8 rows)", "rms_norm, 256 wide", ("rms-norm", 8)),
    ("softmax over 64 (64 rows)", "softmax over 64", ("softmax", 64)),
)
RELU = ("relu", 1024)  # of protocols/README.md alone: its seconds are in no result


def cells(figures: Mapping[str, Any]) -> Cells:
    """Return what tables have to say."""
    costs = {(row["op"], row["size"]): row for row in figures["ops"]}
    assert both_ways(costs["reciprocal", 256]) == both_ways(costs["rsqrt", 256])  # share a row
    return {
        "steps": {_name(step): _of_step(step) for step in figures["steps"]},
        "own text": {
            f"{row['tokens']}, {row['way']}": {
                f"{what}, {part}": text
                for part in ("prefill", "step")
                for what, text in _counts(row[part], "messages", "bytes").items()
            }
            for row in figures["own text"]
        },
        "attention": {
            f"{row['heads']} heads, {row['queries']} queries, prefix {row['prefix']}, cache "
            f"{row['cache']}, {WAYS[row['way']]}": _counts(row, "messages", "rounds", "bytes")
            for row in figures["attention"]
        },
        "bytes by kind": {
            _name(step): {kind: f"{step['bytes_of'].get(kind, 0):,}" for kind in KINDS}
            for step in figures["steps"]
        },
        "verification": {
            f"{row['draft_length']} drafts, {row['variant']} from {row['source']}": _counts(
                row, "messages", "rounds", *DIRECTIONS
            )
            for row in figures["verification"]
        },
        "ops": {
            f"{name}, {size:,}": {
                "messages, ours": str(row["messages"]),
                "bytes online, ours": bytes_text(both_ways(row)),
            }
            for (name, size), row in costs.items()
        },
        "functions": {name: _of_function(costs[case]) for name, _, case in FUNCTIONS},
        "protocol functions": {"relu": _of_function(costs[RELU])}
        | {name: _of_function(costs[case]) for _, name, case in FUNCTIONS},
        "protocol ops": _of_protocols(figures["protocols"]),
        "comparisons": {
            f"{row['bits']} bits, {row['values']:,} at once": {
                "messages": str(row["messages"]),
                "transfers": str(row["transfers"]),
                "sums of products, kept": str(row["sums"]),
            }
            for row in figures["comparisons"]
        },
    }


def _name(step: Mapping[str, Any]) -> str:
    return f"{step['model']}, {step['step']}"


def _counts(cost: Mapping[str, Any], *columns: str) -> dict[str, str]:
    there = {
        **cost,
        "bytes, client to provider": cost["client_to_provider"],
        "bytes, provider to client": cost["provider_to_client"],
        "bytes": both_ways(cost),
    }
    return {column: f"{there[column]:,}" for column in columns}


def _of_step(step: Mapping[str, Any]) -> dict[str, str]:
    block = _counts(step["block"], "messages", "rounds", "bytes")
    return {
        **_counts(step, "messages", "rounds"),
        **{f"{column} of a block": text for column, text in block.items()},
        **_counts(step, *DIRECTIONS, "bytes"),
    }


def _of_function(row: Mapping[str, Any]) -> dict[str, str]:
    each = both_ways(row) / row["values"]
    return {"messages": str(row["messages"]), "bytes online per value": f"{each:,.0f}"}


def _of_protocols(ops: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    def messages(*names: str) -> str:
        (number,) = {ops[name]["messages"] for name in names}
        return str(number)

    def each(*names: str) -> str:
        """Return the bytes per value: whole numbers and short fractions as they are, others
        rounded.
        """
        (exact,) = {Fraction(both_ways(ops[name]), ops[name]["values"]) for name in names}
        if exact < 1 and exact.denominator <= 4:
            return str(exact)
        return f"{float(exact):.2f}".rstrip("0").rstrip(".")

    units = {
        "and_bits": " per bit",
        "to_arith": " per bit",
        "truncate unbiased": "",
        "truncate local": "",
        "matmul": " per entry of x and y",
        "linear": " per entry of x",
        "joint_fraction": " per bit",
        "narrow": "",
        "widen": "",
        "exponential": "",
    }
    cells = {name: (messages(name), each(name) + unit) for name, unit in units.items()}
    cells |= {
        name: (f"{messages(name)} at 9 x 32,000", f"{each(name)} at 26 bits")
        for name in ("maximum", "argmax")
    }
    cells |= {
        "sign": (
            ", ".join(f"{messages(f'sign {n}')} at {n}" for n in (9, 12, 24, 32, 64))
            + " bits, some thousand values",
            f"{each('sign 12')} at 12 bits, {each('sign 24')} at 24, {each('sign 64')} at 64",
        ),
        "below": (
            messages("below 6", "below 100"),
            f"{each('below 6')} for 6 thresholds of 14 bits, {each('below 100')} for 100 of 28",
        ),
        "prefix_or": (
            f"{messages('prefix_or 4')} for 4 bits, {messages('prefix_or 8')} for 8, "
            f"{messages('prefix_or 20')} for 20",
            f"{each('prefix_or 4')} per bit for 4 bits, {each('prefix_or 8')} for 8, "
            f"{each('prefix_or 20')} for 20",
        ),
        "truncate exact": (
            f"{messages('truncate exact')} at k = 18",
            f"{each('truncate exact')} at k = 18",
        ),
        "multiply, square": (
            messages("multiply", "square"),
            f"{each('multiply')}, {each('square')}",
        ),
        "field_multiply, field_square": (
            messages("field_multiply", "field_square"),
            f"{each('field_multiply')}, {each('field_square')}",
        ),
        "joint_bits, joint_words": (messages("joint_bits", "joint_words"), each("joint_words")),
        "mux": (
            messages("mux", "mux 25", "mux 32"),
            f"{each('mux')}; {each('mux 25', 'mux 32')} for words of 25 to 32 bits",
        ),
        "reject, residual, locate": (
            ", ".join(map(messages, ("reject", "residual", "locate"))),
            f"{each('reject')}, {each('residual')}, {each('locate')} at V = 32,000",
        ),
    }
    bits, online = "messages online (both parties)", "bytes online per value, both ways"
    return {
        "select": {bits: messages("select")},
        **{name: {bits: count, online: size} for name, (count, size) in cells.items()},
    }


# ---- documents


def _stale(line: int, table: str, row: str, column: str, stands: str, wanted: str) -> str:
    """Describe a cell that does not say what the code does."""
    where = f"line {line}, table {table}, row {row!r}, {column!r}"
    return f"{where}: found {stands!r}, the code says {wanted!r}"


def plain(cell: str) -> str:
    """Return a cell's text without links, code marks, emphasis, and the mark of an exact column."""
    text = re.sub(r"[`*]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell))
    return text.strip().removesuffix(" =")


def split(line: str) -> list[str]:
    """Return the cells of a row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def checked(text: str, wanted: Cells) -> tuple[str, list[str]]:
    """Return the document with its exact cells as wanted, and those that were not. Rows that should
    be there and are not, and tables that nobody knows, count as stale.
    """
    lines, stale = text.splitlines(), []
    for name, start in _tables(lines):
        if name not in wanted:
            stale.append(_stale(start, name, "", "", "a table", "nothing of this name"))
            continue
        heads = [plain(cell) for cell in split(lines[start])]
        left = dict(wanted[name])
        for number in range(start + 2, len(lines)):
            if not lines[number].startswith("|"):
                break
            row = split(lines[number])
            keys = plain(row[0]), ", ".join(map(plain, row[:2]))
            key = next((key for key in keys if key in left), None)
            if key is None:
                continue
            for column, cell in left.pop(key).items():
                if column not in heads:
                    stale.append(_stale(number + 1, name, key, column, "no such column", cell))
                elif plain(row[heads.index(column)]) != cell:
                    old, row[heads.index(column)] = row[heads.index(column)], cell
                    stale.append(_stale(number + 1, name, key, column, old, cell))
            lines[number] = f"| {' | '.join(row)} |"
        if name not in _PARTS:
            stale += [_stale(start + 1, name, key, "", "no such row", "one") for key in left]
    return "\n".join(lines) + "\n", stale


def _tables(lines: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the names of tables, and where their heads are."""
    for number, line in enumerate(lines):
        if match := _MARK.match(line):
            yield match[1], number + 1


def documents(figures: Mapping[str, Any], *, write: bool) -> list[str]:
    """Return what is stale in the repository's documents; with `write`, bring it up to date."""
    mistakes = []
    for path in DOCUMENTS:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            raise InputError(f"{path} is not there: this needs a checkout") from None
        right, stale = checked(text, cells(figures))
        mistakes += [f"{path.relative_to(ROOT)}: {cell}" for cell in stale]
        if write and right != text:
            path.write_text(right, encoding="utf-8")
    return mistakes


def stored(path: Path) -> Any:
    """Return what was written; nothing where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def table(figures: Mapping[str, Any]) -> str:
    """Return steps and their blocks, as Markdown."""
    rows = cells(figures)["steps"]
    heads = list(next(iter(rows.values())))
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    return "\n".join(
        lines + [f"| {name} | {' | '.join(row.values())} |" for name, row in rows.items()]
    )
