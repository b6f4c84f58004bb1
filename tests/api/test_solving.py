"""What is written of a split model's programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from spu_llm.api.solving import _append, _held


@pytest.mark.parametrize("there", ["", "{}\n", "{}", "1"])
def test_a_completion_begins_a_line(there: str, tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    path.write_text(there)
    with _held(path) as file:
        _append(file, path, "t", ["a", "é"])
        _append(file, path, "u", [])
    before = there.split()
    lines = ['{"task_id": "t", "completion": "a"}', '{"task_id": "t", "completion": "\\u00e9"}']
    assert path.read_text() == "".join(f"{line}\n" for line in before + lines)
