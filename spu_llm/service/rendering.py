"""Chat templates of a provider: rendered in a process of their own, which sees nothing but the chat
and is ended when it takes long.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from models.chat import Message, Template
from spu_llm.core.errors import InputError
from spu_llm.service.calls import confine_calls
from spu_llm.service.confine import confine_files, drop_rights

RENDER_S = 5.0
_MEMORY_BYTES = 1 << 30


def render_apart(template: Template, messages: Sequence[Message]) -> str:
    """Return `template.render(messages)`, rendered by a process that has no files and no network.
    InputError, too, when that takes more than RENDER_S or much memory.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    given = {"template": asdict(template), "messages": [asdict(m) for m in messages]}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(given).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=RENDER_S,
            env={name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ},
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"the model's chat template was not done within {RENDER_S:g} s; complete text with "
            "generate"
        ) from None
    said = _read(done.stdout)
    if "text" not in said:
        raise InputError(said.get("refused", "the model's chat template cannot be rendered"))
    return str(said["text"])


def _read(written: bytes) -> dict[str, Any]:
    try:
        said = json.loads(written)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _import_all() -> None:
    """Import what rendering needs, while there are files: some of it only templates ask for."""
    import pprint  # noqa: F401
    import textwrap  # noqa: F401

    import jinja2.constants
    import jinja2.debug  # noqa: F401

    Template("{{ '\\n' }}").render([])


def main() -> None:
    """Render the chat on standard input; what came of it goes to standard output, as JSON."""
    _import_all()
    given = json.loads(sys.stdin.buffer.read())
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    drop_rights()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(RENDER_S), int(RENDER_S)))
    confine_files([], [])
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # nor sockets, which these calls include
    confine_calls()
    messages = [Message(**fields) for fields in given["messages"]]
    try:
        said = {"text": Template(**given["template"]).render(messages)}
    except InputError as refused:
        said = {"refused": str(refused)}
    with out:
        out.write(json.dumps(said))
