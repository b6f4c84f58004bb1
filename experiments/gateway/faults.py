"""Faults: each in turn comes while a streamed and an unstreamed answer are written, and one more
request is made after it.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.gateway.asking import Reply, ask
from experiments.gateway.forwarding import Forwarder
from experiments.gateway.load import gateway_options, provider_options
from experiments.gateway.parties import Party, can_mount, kill_all, left_after, until
from experiments.gateway.plan import FaultsPlan
from spu_llm.core.errors import SpuLlmError
from spu_llm.core.machine import machine

Row = dict[str, Any]
_BEGIN_S = 600.0  # for the first text of the stream
_END_S = 300.0  # after a fault, for both requests to end
_GONE_S = 15.0  # for processes of a party that was killed
SHIFTED = "experiments.gateway.shifted"
_CHATS = ("def area(width, height):", "class Stack:", "for name in names:", "import json")


class Scene:
    """A gateway and a provider with a forwarder in between, each on a disk of its own where that
    can be, and on a clock that can jump.
    """

    def __init__(self, plan: FaultsPlan, model: Path, folder: Path) -> None:
        self.plan, self._folder, self._model = plan, folder, model
        self.has_disks = can_mount(folder)
        self._sessions = plan.at_once + plan.keep + 2
        self.provider = self._provider("127.0.0.1:0")
        self.forwarder = Forwarder(self.provider.port)
        try:
            self.gateway = self._gateway("127.0.0.1:0")
        except BaseException:
            self.provider.stop()
            raise

    def _party(self, name: str, arguments: list[str], listen: str) -> Party:
        arguments[arguments.index("--listen") + 1] = listen
        disk = self.plan.disk_mib if self.has_disks else None
        return Party(arguments, self._folder / name, module=SHIFTED, disk_mib=disk)

    def _provider(self, listen: str) -> Party:
        options = provider_options(self._model, self._sessions)
        return self._party("provider", options, listen)

    def _gateway(self, listen: str) -> Party:
        plan = self.plan
        options = gateway_options(self.forwarder.port, plan.at_once, plan.keep)
        return self._party("gateway", options, listen)

    def restart_provider(self) -> None:
        self.provider = self._provider(f"127.0.0.1:{self.provider.port}")

    def restart_gateway(self) -> None:
        self.gateway = self._gateway(f"127.0.0.1:{self.gateway.port}")

    def close(self) -> list[int]:
        """End both parties; return the processes that had to be killed."""
        left = self.gateway.stop() + self.provider.stop()
        self.forwarder.close()
        return left

    def ask(self, chat: str, tokens: int, *, stream: bool, on_text: Callable[[], None]) -> Reply:
        said = [{"role": "user", "content": chat}]
        return ask(self.gateway.port, said, tokens, stream=stream, on_text=on_text)


@dataclass(frozen=True)
class Fault:
    """A fault: what happens, how it is undone, and whether requests may still be answered."""

    name: str
    strike: Callable[[Scene], None]
    mend: Callable[[Scene], None] = lambda scene: None
    before: Callable[[Scene], None] = lambda scene: None  # either request is made
    ends: str = "error"  # "error", "broken" (whom they were asked of is gone), or "answered"
    needs_disks: bool = False


def _killed(party: str) -> Callable[[Scene], None]:
    return lambda scene: kill_all(getattr(scene, party).workers())


def _party_killed(party: str) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        one = getattr(scene, party)
        workers = one.workers()
        one.kill()
        if left := left_after(workers, _GONE_S):
            kill_all(left)
            raise SpuLlmError(f"{len(left)} workers outlive the {party}")

    return strike


def _jumped(number: int) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        for party in (scene.gateway, scene.provider):
            party.send(number)

    return strike


def _place(party: Party) -> Path:
    """Return a party's disk as this process reaches it."""
    return Path(f"/proc/{party.pid}/root{party.disk}")


def _filled(party: str) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        with suppress(OSError), open(_place(getattr(scene, party)) / "filling", "wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()

    return strike


def _freed(party: str) -> Callable[[Scene], None]:
    return lambda scene: (_place(getattr(scene, party)) / "filling").unlink()


def _filled_without_hints(scene: Scene) -> None:
    """Fill the gateway's disk before any session has the hint."""
    kill_all(scene.gateway.workers())
    cache = _place(scene.gateway) / "cache"
    for entry in cache.iterdir():
        shutil.rmtree(entry, ignore_errors=True)
    _filled("gateway")(scene)


def _restart_provider(scene: Scene) -> None:
    scene.restart_provider()


def _restart_gateway(scene: Scene) -> None:
    scene.restart_gateway()


def _nothing(scene: Scene) -> None:
    pass


FAULTS = (
    Fault("kill -9 of the gateway's workers", _killed("gateway")),
    Fault("kill -9 of the provider's workers", _killed("provider")),
    Fault(
        "kill -9 of the provider; it is started again", _party_killed("provider"), _restart_provider
    ),
    Fault(
        "kill -9 of the gateway; it is started again",
        _party_killed("gateway"),
        _restart_gateway,
        ends="broken",
    ),
    Fault(
        "all connections between both are reset",
        lambda scene: scene.forwarder.cut(),
        lambda scene: scene.forwarder.mend(),
    ),
    Fault(
        "the network between both falls silent",
        lambda scene: scene.forwarder.stall(),
        lambda scene: scene.forwarder.mend(),
    ),
    Fault(
        "the gateway's disk fills up",
        _filled("gateway"),
        _freed("gateway"),
        ends="answered",
        needs_disks=True,
    ),
    Fault(
        "the provider's disk fills up",
        _filled("provider"),
        _freed("provider"),
        ends="answered",
        needs_disks=True,
    ),
    Fault(
        "the gateway's disk is full before it has a hint",
        _nothing,
        _freed("gateway"),
        before=_filled_without_hints,
        ends="answered",
        needs_disks=True,
    ),
    Fault("the clock jumps 6 h ahead", _jumped(signal.SIGUSR1), ends="answered"),
    Fault("the clock jumps 6 h back", _jumped(signal.SIGUSR2), ends="answered"),
)


class _Asked:
    """A request in a thread of its own."""

    def __init__(self, scene: Scene, chat: str, *, stream: bool) -> None:
        self.has_text, self.reply = threading.Event(), Reply(begun_s=time.monotonic())
        self._thread = threading.Thread(target=self._ask, args=(scene, chat, stream), daemon=True)
        self._thread.start()

    def _ask(self, scene: Scene, chat: str, stream: bool) -> None:
        self.reply = scene.ask(
            chat, scene.plan.answer_tokens, stream=stream, on_text=self.has_text.set
        )

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def after(self, struck_s: float) -> Row:
        """Return how it ended, and how long that took after the fault."""
        if not self.has_ended:
            return {"how": "lost", "after": None, "status": 0, "message": ""}
        reply = self.reply
        after = reply.begun_s + reply.seconds - struck_s
        said = {"how": reply.how, "status": reply.status, "message": reply.message}
        return {"after": round(after, 2), **said}


def meet(scene: Scene, fault: Fault) -> Row:
    """Return what becomes of both requests when a fault comes, and of the one after it."""
    fault.before(scene)
    begun = time.monotonic()
    streamed = _Asked(scene, _CHATS[0], stream=True)
    whole = _Asked(scene, _CHATS[1], stream=False)
    until(lambda: streamed.has_text.is_set() or streamed.has_ended, _BEGIN_S)
    had_text = streamed.has_text.is_set()
    struck = time.monotonic()
    failure = ""
    try:
        fault.strike(scene)
    except SpuLlmError as error:
        failure = str(error)
    until(lambda: streamed.has_ended and whole.has_ended, _END_S)
    row = {
        "fault": fault.name,
        "ends": fault.ends,
        "had_text": had_text,
        "before": round(struck - begun, 2),
        "streamed": streamed.after(struck),
        "whole": whole.after(struck),
        "failure": failure,
    }
    fault.mend(scene)
    mended = time.monotonic()
    reply = scene.ask(_CHATS[2], scene.plan.next_tokens, stream=False, on_text=lambda: None)
    seconds = round(time.monotonic() - mended, 2)
    return row | {"next": {"how": reply.how, "message": reply.message, "seconds": seconds}}


def run(
    plan: FaultsPlan,
    model: Path,
    folder: Path,
    say: Callable[[str], None],
    keep: Callable[[Row], None],
) -> Row:
    """Start both parties, and meet every fault; `keep` gets the result after each."""
    say("starting both parties")
    scene = Scene(plan, model, folder)
    result: Row = {"plan": asdict(plan), "rows": [], "left_out": [], "load": os.getloadavg()[0]}
    try:
        # Compiles, and fetches the hint.
        scene.ask(_CHATS[3], plan.next_tokens, stream=False, on_text=lambda: None)
        for fault in FAULTS:
            if fault.needs_disks and not scene.has_disks:
                result["left_out"].append(fault.name)
                continue
            say(fault.name)
            result["rows"].append(meet(scene, fault))
            result["machine"] = asdict(machine())
            keep(result)
    finally:
        result["left"] = scene.close()
    return result
