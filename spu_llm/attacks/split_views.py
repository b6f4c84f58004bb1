"""A real run of a split model whose middle runs on shares, as its host sees it: this process is the
host's, and the client's worker a process of its own, which tells what it hid.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from models.split import Split
from models.tokenizer import Tokenizer
from spu_llm.api.defaults import SESSION_MINUTES
from spu_llm.attacks.views import HOST, started
from spu_llm.service import provider
from spu_llm.service.client import Server, run_as_client
from spu_llm.service.limits import Quota, Quotas
from spu_llm.systems.split import secure_viewed


class MiddleViews(NamedTuple):
    """Words uint64 [n, d] of each text, from the one message of a forward's first product: rows in
    fixed point (`secure_viewed.as_rows`). received: as they came, under masks of the client's;
    unmasked: the same words without the masks, which the client alone knows.
    """

    received: list[np.ndarray]
    unmasked: list[np.ndarray]


def views_of_middle(
    model: Path,
    split: Split,
    texts: Sequence[Sequence[int]],
    on_stage: Callable[[str], None] = lambda name: None,
    *,
    steps: int = 0,
) -> MiddleViews:
    """Return what the host received in place of the boundary rows of each text, and what is under
    the masks. `steps`: the last so many tokens come one by one, each in a forward of its own, after
    a prefill of those before.
    """
    views = MiddleViews([], [])

    def note(of_party: list[np.ndarray], event: dict[str, Any]) -> None:
        if event["event"] == "seen":
            words = np.frombuffer(base64.b64decode(event["words"]), np.uint64)
            of_party.append(words.reshape(event["shape"]))
        elif event["event"] == "stage" and of_party is views.unmasked:
            on_stage(event["name"])

    options = provider.ServeOptions.rehearsal(
        model, quotas=Quotas(Quota(minutes=SESSION_MINUTES)), studies=True
    )
    port = started(
        lambda on_port: provider.serve(
            options,
            lambda record: on_stage(record.words),
            on_port,
            lambda event: note(views.received, event),
        )
    )
    prompts = tuple(len(text) - steps for text in texts)
    run_as_client(
        Server(HOST, port, "local"),
        secure_viewed.PROGRAM,
        secure_viewed.ViewedMiddleRequest(prompts, steps, *split),
        secure_viewed.ViewedMiddleInputs([list(map(int, text)) for text in texts], str(model)),
        lambda event, relay: note(views.unmasked, event),
        tokenizer=Tokenizer.load(model),
    )
    return views
