"""A gateway's stock on disk, kept filled by producers on a cluster while its chats go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from spu_llm.api import preparation
from spu_llm.api.client import Client, CompletionOptions
from spu_llm.api.conversation import Ahead
from spu_llm.app import keeping
from spu_llm.core.errors import InputError
from spu_llm.core.printable import one_line


def begin(
    client: Client,
    options: CompletionOptions,
    ahead: Ahead,
    address: str,
    pairs: int | None,
    doors: Sequence[tuple[str, int]],
    say: Callable[[str], None],
) -> None:
    """Find out, in a session, what a turn of a chat and its answer take, and keep the client's pool
    filled with it from then on, in a thread: producers on the cluster at `address` make what
    lacks, and sessions take it in. `doors`: more ports of the provider for them. `say` hears what
    happens. InputError where no cluster answers.
    """
    from spu_llm.cluster.connection import joined
    from spu_llm.cluster.producing import on_cluster

    with joined(address):
        pass  # says early where there is none
    provider = client.provider
    asked = replace(options, max_new_tokens=ahead.answer_tokens)
    request, text = client.chat_to_prepare(ahead.turn_tokens, asked)
    counted = preparation.count(request, text.tokenizer, provider, text_format=text.digest)
    folder = Path(counted.config["pool"], counted.config["peer"])

    def restock() -> int:
        with on_cluster(address, provider.server, provider.pool, pairs, doors) as producers:
            return preparation.restock(counted, request, folder, producers, text_format=text.digest)

    def keep() -> None:
        while True:
            try:
                keeping.keep(folder.parent, None, say, restock=restock, made=counted.to_json())
            except Exception as exc:  # of Ray's, too: the gateway goes on
                say(f"the stock is not filled, trying again: {one_line(str(exc))[:300]}")
                time.sleep(keeping.AWAY_MOST_S)

    threading.Thread(target=keep, name="stocking", daemon=True).start()


def check(server: object, pool: Path | None, models: int, ahead: Ahead | None) -> None:
    """Raise InputError where a gateway has no stock on disk that a cluster could fill."""
    if server is None or pool is None:
        raise InputError("--ray fills a stock that sessions take from; give --server and --pool")
    if models != 1:
        raise InputError("--ray fills the stock of one model; choose it by --served-model")
    if ahead is None:
        raise InputError("--ray fills a stock for turns of chats; leave --ahead-turn 0 out")
