"""Parsers that raise what is wrong with their input, for the recorded vectors of bad ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spu_llm.net import control, control_plane
from spu_llm.net.control_pb2 import OpenRequest
from spu_llm.net.frames import FrameParser
from spu_llm.net.manifest import Manifest, agree
from spu_llm.offline.pool import _read_inventory
from spu_llm.service.agreeing import asked_model
from tests.fuzz.targets import _Once, _Relay, messages_of


def _frames(data: bytes) -> None:
    parser = FrameParser()
    parser.feed(data)
    parser.finish()


def _control(data: bytes) -> None:
    relay = _Relay()
    control.Control(relay)  # type: ignore[arg-type]
    for message in data.split(b"\n"):
        relay.on_control(message)


def _manifest(data: bytes) -> None:
    own: Manifest = {"jobs": 1, "wire": 3, "nonce": "f" * 32}
    asked = control_plane._manifest(OpenRequest.FromString(data).manifest)
    agree(asked, own | asked_model(asked)[1])


def _messages(data: bytes) -> None:
    assert not list(messages_of(data))


def _sealed(data: bytes) -> None:
    from spu_llm.core.channel import SealedChannel

    SealedChannel(_Once(data), bytes(32), 0).recv()


PARSERS: dict[str, Callable[[bytes], Any]] = {
    "frames": _frames,
    "control": _control,
    "manifest": _manifest,
    "inventory": _read_inventory,
    "messages": _messages,
    "sealed": _sealed,
}
