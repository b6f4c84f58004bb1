"""Load: conversations that ask the gateway for as long as is said, and what it takes meanwhile."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.common.load import busy_seconds, own_seconds, seconds_of
from experiments.gateway.asking import PATH, ask, get
from experiments.gateway.checking import Reference
from experiments.gateway.parties import Party, usage
from experiments.gateway.plan import DRAIN_S, SAMPLE_S, LoadPlan
from models.chat import Message
from spu_llm.api.defaults import shipped
from spu_llm.core.machine import machine

Row = dict[str, Any]
Keep = Callable[[dict[str, Any]], None]
KEEP_EVERY_S = 60.0
_STEP = 7919  # a prime: chats that begin one after another have lines from far apart
_RETRY_S = 5.0


def lines() -> list[str]:
    """Return what is said in chats: lines of the held-out snippets, each different."""
    texts = shipped("held_out.jsonl").read_text(encoding="utf-8").splitlines()
    parts = (line.strip() for text in texts for line in json.loads(text)["text"].splitlines())
    return list(dict.fromkeys(part for part in parts if 8 <= len(part) <= 24))


class Conversations:
    """The programs that ask, a thread for each of their chats, and how each request ended."""

    def __init__(self, plan: LoadPlan, port: int) -> None:
        self.rows: list[Row] = []
        self.asked = 0
        self._plan, self._port, self._lines = plan, port, lines()
        self._begun, self._lock, self._over = time.monotonic(), threading.Lock(), threading.Event()
        self._number = itertools.count()
        self._threads = [
            threading.Thread(target=self._chats, args=(conversation, chat), daemon=True)
            for chat in range(plan.chats)
            for conversation in range(plan.conversations)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def end(self) -> None:
        """Have nobody ask any more; requests that were made wait for their answers."""
        self._over.set()

    def have_ended(self, seconds: float) -> bool:
        """Wait for the last answers, no longer than so long."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _chats(self, conversation: int, chat: int) -> None:
        for number in itertools.count():
            said: list[dict[str, str]] = []
            for turn in range(self._plan.turns):
                if self._over.is_set():
                    return
                at = next(self._number)
                said.append({"role": "user", "content": self._line(at)})
                row = self._ask(said, stream=(chat + number + turn) % 2 == 0)
                row |= {"conversation": conversation, "chat": [chat, number], "turn": turn}
                with self._lock:
                    self.rows.append(row)
                if row["how"] != "answered":
                    self._over.wait(_RETRY_S)
                    break
                said.append({"role": "assistant", "content": row["text"]})

    def _line(self, at: int) -> str:
        return self._lines[at * _STEP % len(self._lines)]

    def _ask(self, said: Sequence[dict[str, str]], *, stream: bool) -> Row:
        with self._lock:
            self.asked += 1
        reply = ask(self._port, said, self._plan.answer_tokens, stream=stream)
        counts = reply.usage
        return {
            "said": [one["content"] for one in said],
            "streamed": stream,
            "begun": round(reply.begun_s - self._begun, 3),
            "seconds": round(reply.seconds, 3),
            "first_text": None if reply.first_text_s is None else round(reply.first_text_s, 3),
            "how": reply.how,
            "status": reply.status,
            "message": reply.message,
            "id": reply.id,
            "text": reply.text,
            "finish": reply.finish,
            "prompt_tokens": counts.get("prompt_tokens"),
            "cached_tokens": counts.get("prompt_tokens_details", {}).get("cached_tokens"),
            "tokens": counts.get("completion_tokens"),
        }


def provider_options(model: Path, sessions: int) -> list[str]:
    """Return the command of a provider for this machine alone."""
    listen = ["--listen", "127.0.0.1:0", "--insecure"]
    return ["serve", "--model", str(model), *listen, "--sessions", str(sessions)]


def gateway_options(port: int, at_once: int, keep: int) -> list[str]:
    """Return the command of a gateway before the provider at a port."""
    listen = ["--insecure", "--listen", "127.0.0.1:0"]
    many = ["--at-once", str(at_once), "--keep", str(keep)]
    return ["gateway", "--server", f"127.0.0.1:{port}", *listen, *many]


def run(plan: LoadPlan, model: Path, folder: Path, say: Callable[[str], None], keep: Keep) -> Row:
    """Start both parties, have conversations ask for the plan's minutes, and wait for their last
    answers; return what was seen. `keep` gets the result so far every minute.
    """
    say("starting both parties")
    provider = Party(provider_options(model, plan.at_once + plan.keep + 2), folder / "provider")
    try:
        gateway = Party(gateway_options(provider.port, plan.at_once, plan.keep), folder / "gateway")
    except BaseException:
        provider.stop()
        raise
    parties = {"gateway": gateway, "provider": provider}
    result: Row = {"plan": asdict(plan), "rows": [], "samples": []}
    try:
        _watch(plan, parties, result, say, keep)
        result["counted"] = _counted(get(gateway.port, "/metrics").decode())
    finally:
        result["left"] = [party.stop() for party in parties.values()]
        keep(result)
    say("comparing the answers with the model's own")
    check(result["rows"], Reference(model))
    return result


def _watch(
    plan: LoadPlan, parties: dict[str, Party], result: Row, say: Callable[[str], None], keep: Keep
) -> None:
    """Let conversations ask until the time is over, and look at both parties meanwhile."""
    asking = Conversations(plan, parties["gateway"].port)
    over, kept, others = 60 * plan.minutes, 0.0, _Others(parties)
    result["rows"] = asking.rows  # grows
    while not (ended := asking.have_ended(SAMPLE_S)) and asking.seconds < over + DRAIN_S:
        if asking.seconds >= over:
            asking.end()
        result["samples"].append(_sample(asking, parties))
        result |= {"asked": asking.asked, "others": others.cores()}
        result |= {"seconds": round(asking.seconds, 1), "machine": asdict(machine())}
        say(f"{len(asking.rows)} of {asking.asked} requests answered")
        if asking.seconds > kept + KEEP_EVERY_S:
            kept = asking.seconds
            keep(result)
    result |= {"asked": asking.asked, "ended": ended}


def _sample(asking: Conversations, parties: dict[str, Party]) -> Row:
    try:
        health = json.loads(get(parties["gateway"].port, "/health"))
    except (OSError, ValueError):
        health = {}
    return {
        "at": round(asking.seconds, 1),
        "answered": len(asking.rows),
        "requests": health.get("requests"),
        "open_chats": health.get("conversations"),
        **usage(parties),
    }


class _Others:
    """Cores that were busy with other work, from now on. A worker's time that ended between two
    looks counts as other work, so this is an upper bound.
    """

    def __init__(self, parties: dict[str, Party]) -> None:
        self._parties, self._seen = parties, dict[int, float]()
        self._busy, self._own, self._at = busy_seconds(), own_seconds(), time.monotonic()
        self._before = self._ours()

    def _ours(self) -> float:
        for party in self._parties.values():
            for pid in (party.pid, *party.workers()):
                try:
                    self._seen[pid] = seconds_of([pid])
                except OSError:
                    continue
        return sum(self._seen.values()) + own_seconds() - self._own

    def cores(self) -> float:
        """Return how many cores other work kept busy in the mean."""
        busy, ours = busy_seconds() - self._busy, self._ours() - self._before
        return round(max(0.0, busy - ours) / (time.monotonic() - self._at), 2)


def _counted(text: str) -> int:
    """Return how many requests the gateway says that it has answered."""
    pattern = rf'^spu_llm_requests_total{{path="{PATH}",status="200"}} (\S+)$'
    match = re.search(pattern, text, re.MULTILINE)
    return 0 if match is None else int(float(match[1]))


def check(rows: list[Row], reference: Reference) -> None:
    """Give each answered row its `margin` (`margin_of`; None where no likely tokens write the
    answer) and `counts`, whether the gateway counted the tokens of this very chat.
    """
    tokens: dict[tuple[Any, ...], list[int]] = {}  # of a chat, its last answer included
    for row in sorted(rows, key=lambda row: (row["begun"], row["turn"])):
        if row["how"] != "answered":
            continue
        chat = [Message(_role(i), said) for i, said in enumerate(row["said"])]
        key, head = (row["conversation"], *row["chat"]), reference.begins(chat)
        before = tokens.get(key)
        # The cache of a session that goes on has all of the earlier turns but the last token.
        goes_on = before is not None and row["cached_tokens"] >= len(before) - 1
        prompt = reference.goes_on(before or [], chat) if goes_on else head
        judged = reference.margin(prompt, row["text"], row["tokens"])
        row["counts"] = row["prompt_tokens"] == len(prompt)
        row["margin"] = None if judged is None else round(judged[0], 6)
        if judged is not None:
            tokens[key] = [*prompt, *judged[1]]
        else:
            tokens.pop(key, None)


def _role(i: int) -> str:
    return "assistant" if i % 2 else "user"
