"""Real runs, as the model's owner sees them: this process is hers, and the other party's, or a
vault's, are processes of their own on this machine.
"""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.tokenizer import Tokenizer
from spu_llm.api.defaults import SESSION_MINUTES
from spu_llm.core.errors import PeerError, SpuLlmError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.service import provider
from spu_llm.service.client import Server, run_as_client
from spu_llm.service.launching import end
from spu_llm.service.limits import Quota, Quotas
from spu_llm.service.supervisor import python_command
from spu_llm.systems.confidential.attacks.views import Seen, Shares, WatchingEngine
from spu_llm.systems.decoding import viewed
from spu_llm.vault import engine, told, user

HOST = "127.0.0.1"
_LANES = 16  # prompts that go together
_START_S = 60.0
_EXIT_S = 5.0


def of_vault(
    model: Path,
    prompts: Sequence[Sequence[int]],
    steps: int,
    temperature: float,
    seed: int,
    on_stage: Callable[[str], None],
) -> list[Seen]:
    """Return what the engine sees of these prompts, in their order, with at most so many generated
    tokens each: engine here, a vault process, and its user's requests from here.
    """
    parts = [prompts[at : at + _LANES] for at in range(0, len(prompts), _LANES)]
    # The last token goes to nobody.
    wishes = [
        user.Wish(part, [], steps + 1, temperature, seed + _LANES * i)
        for i, part in enumerate(parts)
    ]
    return [seen for together in of_wishes(model, wishes, on_stage) for seen in together]


def of_wishes(
    model: Path, wishes: Sequence[user.Wish], on_stage: Callable[[str], None]
) -> list[list[Seen]]:
    """Return what the engine sees of a user's successive requests, by request and prompt."""
    engines: list[WatchingEngine] = []

    def make(*args: Any) -> WatchingEngine:
        engines.append(WatchingEngine(*args))
        return engines[0]

    # Lanes are given back a moment after their texts: there is room for two requests.
    lanes = 2 * max(len(wish.prompts) for wish in wishes)
    options = engine.EngineOptions(model, HOST, 0, lanes, None)
    port = started(lambda on_port: engine.serve(options, on_stage, on_port, make))
    with _vault(port) as place:
        for i, wish in enumerate(wishes):
            on_stage(f"request {i + 1} of {len(wishes)}")
            user.generate(place, lambda model, wish=wish: wish)  # type: ignore[misc]
    seen = iter(engines[0].seen)
    return [[next(seen) for _ in wish.prompts] for wish in wishes]


def of_two_parties(
    model: Path,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    on_stage: Callable[[str], None],
) -> list[tuple[list[Shares], list[Shares]]]:
    """Return shares of the first layer's attention, of client and provider: of each prompt those of
    its prefill, and of a step for each of its `tokens`, as many for all. The provider is this
    process and its worker, the client's worker another one.
    """
    told: tuple[list[Shares], list[Shares]] = [], []

    def note(rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "seen":
            told[rank].append(Shares.of_event(event))
        elif event["event"] == "stage" and rank == CLIENT:
            on_stage(event["name"])

    asked = viewed.ViewedRequest(tuple(map(len, prompts)), len(tokens[0]))
    options = provider.ServeOptions.rehearsal(
        model, quotas=Quotas(Quota(minutes=SESSION_MINUTES)), studies=True
    )
    port = started(
        lambda on_port: provider.serve(
            options,
            lambda record: on_stage(record.words),
            on_port,
            lambda event: note(PROVIDER, event),
        )
    )
    run_as_client(
        Server(HOST, port, "local"),
        viewed.PROGRAM,
        asked,
        viewed.ViewedInputs([list(p) for p in prompts], [list(t) for t in tokens]),
        lambda event, relay: note(CLIENT, event),
        tokenizer=Tokenizer.load(model),
    )
    each = 1 + asked.steps
    return [
        (told[CLIENT][at : at + each], told[PROVIDER][at : at + each])
        for at in range(0, each * len(prompts), each)
    ]


def started(serve: Callable[[Callable[[int], None]], None]) -> int:
    """Run `serve(on_port)` in a thread; return the port where it listens."""
    said: queue.Queue[int | SpuLlmError] = queue.Queue()

    def run() -> None:
        try:
            serve(said.put)
        except SpuLlmError as exc:
            said.put(exc)

    threading.Thread(target=run, daemon=True).start()
    port = said.get(timeout=_START_S)
    if isinstance(port, SpuLlmError):
        raise port
    return port


@contextmanager
def _vault(port: int) -> Iterator[told.Place]:
    """Start a vault process of the engine that listens at `port`; yield where its user finds it."""
    command = [*python_command("spu_llm.app.cli"), "vault", "open", "--insecure"]
    command += ["--server", f"{HOST}:{port}", "--listen", f"{HOST}:0", "--exit-with-parent"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise PeerError("the vault did not start")
        yield told.Place(HOST, int(line.rpartition(":")[2]), None)
    finally:
        end(process, _EXIT_S)
