"""Private inference with large language models between two parties (SPU Cheetah, JAX).

    from spu_llm import Client, CompletionOptions, Provider

    client = Client(Provider.here("models/shipped/private"))
    completion = client.complete("def read_config(path):", CompletionOptions(max_new_tokens=16))
    print(completion.text, completion.learned["provider"])

Names are imported when they are used: the framework's processes start without what they do not
need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.chat import Message
    from spu_llm.api.client import Client, CompletionOptions
    from spu_llm.api.completion import Completion
    from spu_llm.api.events import Event
    from spu_llm.api.preparation import Prepared
    from spu_llm.api.provider import Provider
    from spu_llm.core.errors import SpuLlmError

_MODULES = {
    "Provider": "spu_llm.api.provider",
    "Client": "spu_llm.api.client",
    "CompletionOptions": "spu_llm.api.client",
    "Message": "models.chat",
    "Event": "spu_llm.api.events",
    "Completion": "spu_llm.api.completion",
    "Prepared": "spu_llm.api.preparation",
    "SpuLlmError": "spu_llm.core.errors",
}

__all__ = [
    "Provider", "Client", "CompletionOptions", "Message", "Event", "Completion", "Prepared",
    "SpuLlmError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"spu_llm has no {name}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
