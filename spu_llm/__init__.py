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
    from spu_llm.api.conversation import Answer, Conversation
    from spu_llm.api.events import Event, Learned, Making, Stage, Step, Text, Token
    from spu_llm.api.preparation import NoRoom, Prepared
    from spu_llm.api.private_text import PrivateTextOptions, PrivateTexts, private_texts
    from spu_llm.api.provider import Provider
    from spu_llm.api.split import SplitClient, SplitOptions
    from spu_llm.api.tuning import Tuned, TuneOptions, tune
    from spu_llm.api.vault import VaultOptions, VaultText, complete_by_vault
    from spu_llm.api.watermarking import Embedding, EmbedOptions, MarkedText
    from spu_llm.core.errors import InputError, PeerError, SpuLlmError, WorkerError
    from spu_llm.runtime.simulation import Simulation
    from spu_llm.vault.told import Place

_MODULES = {
    "spu_llm.api.provider": ["Provider"],
    "spu_llm.api.client": ["Client", "CompletionOptions"],
    "models.chat": ["Message"],
    "spu_llm.api.events": ["Event", "Stage", "Making", "Text", "Step", "Token", "Learned"],
    "spu_llm.api.completion": ["Completion"],
    "spu_llm.api.conversation": ["Conversation", "Answer"],
    "spu_llm.api.preparation": ["Prepared", "NoRoom"],
    "spu_llm.api.split": ["SplitClient", "SplitOptions"],
    "spu_llm.api.tuning": ["tune", "TuneOptions", "Tuned"],
    "spu_llm.api.private_text": ["private_texts", "PrivateTextOptions", "PrivateTexts"],
    "spu_llm.vault.told": ["Place"],
    "spu_llm.api.vault": ["complete_by_vault", "VaultOptions", "VaultText"],
    "spu_llm.api.watermarking": ["Embedding", "EmbedOptions", "MarkedText"],
    "spu_llm.runtime.simulation": ["Simulation"],
    "spu_llm.core.errors": ["SpuLlmError", "InputError", "PeerError", "WorkerError"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Provider",
    "Client",
    "CompletionOptions",
    "Message",
    "Event",
    "Stage",
    "Making",
    "Text",
    "Step",
    "Token",
    "Learned",
    "Completion",
    "Conversation",
    "Answer",
    "Prepared",
    "NoRoom",
    "SplitClient",
    "SplitOptions",
    "tune",
    "TuneOptions",
    "Tuned",
    "private_texts",
    "PrivateTextOptions",
    "PrivateTexts",
    "Place",
    "complete_by_vault",
    "VaultOptions",
    "VaultText",
    "Embedding",
    "EmbedOptions",
    "MarkedText",
    "Simulation",
    "SpuLlmError",
    "InputError",
    "PeerError",
    "WorkerError",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"spu_llm has no {name}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
