"""A tiny model that chats, and files of chats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


def chatting(model: Path, directory: Path) -> Path:
    """Copy a model to `directory`, with a template of chats."""
    shutil.copytree(model, directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


def save_chats(path: Path, *words: str, system: str = "") -> Path:
    before = [{"role": "system", "content": system}] if system else []
    lines = [
        {"kind": f"kind {i % 2}", "messages": [*before, {"role": "user", "content": text}]}
        for i, text in enumerate(words)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
