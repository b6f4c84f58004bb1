"""Parsers of what a peer, or whoever gives one a file, may have made: one function of bytes each.

A target says whether the bytes were taken, not refused as they should be, and lets any other error
out. `SEEDS` are bytes that are taken, to start from.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from safetensors.numpy import load_file

from models.gpt2 import GPT2Config
from models.hf import load_model, save_model
from models.importing.run import import_model
from models.llama import LlamaConfig
from models.text_format import TextFormat
from models.tokenizer import Tokenizer
from spu_llm.app import config, named_models
from spu_llm.core.channel import MemoryChannel, SealedChannel
from spu_llm.core.errors import InputError, ManifestMismatch, PeerError, PoolError, WireError
from spu_llm.net import control, control_plane, identity
from spu_llm.net.control_pb2 import ModelInfo, ModelsAnswer, OpenRequest
from spu_llm.net.frames import PREAMBLE, Frame, FrameParser, Kind, encode
from spu_llm.net.manifest import Manifest, agree, with_nonce
from spu_llm.net.messages import Messages
from spu_llm.net.stream_channel import NUMBER_BYTES, StreamChannel
from spu_llm.offline import contents, files
from spu_llm.offline.files import Label, State
from spu_llm.offline.peer_directories import agree as agree_on_folder
from spu_llm.offline.pool import _read_inventory
from spu_llm.service.agreeing import asked_model
from spu_llm.service.first_contact import checked_names
from spu_llm.service.model_names import is_name
from spu_llm.systems.decoding.records import COMPLETION
from spu_llm.systems.split import boundary as split_boundary
from spu_llm.systems.watermark.endpoint import read_completion
from spu_llm.systems.watermark.history import HistoryFile
from spu_llm.systems.watermark.keys import Key, read_key
from spu_llm.systems.watermark.sampler import read_answer
from spu_llm.vault import told
from tests.kit.models import PRIVATE, VOCAB, save_tokenizer, tiny_params
from tests.models.gguf_files import tensors, write_gguf

_OWN: Manifest = {"jobs": 1, "wire": 5}
_KEPT = tempfile.TemporaryDirectory(prefix="spu-llm-fuzz-")  # until this process ends
_FOLDER = Path(_KEPT.name)
_SHARD = "model-00001-of-00001.safetensors"
_AT_ONCE = 64 << 10  # bytes that a socket takes without being read


def frames(data: bytes) -> bool:
    """Return the relay's frames: cut anywhere, they are the same, and back in bytes what they
    were.
    """
    with contextlib.suppress(WireError):
        whole = FrameParser().feed(data)
        parser, cut = FrameParser(), len(data) // 3
        assert parser.feed(data[:cut]) + parser.feed(data[cut:]) == whole
        assert data.startswith(PREAMBLE) or not whole
        taken = data[len(PREAMBLE) :] if data.startswith(PREAMBLE) else b""
        assert taken.startswith(b"".join(map(encode, whole)))
        parser.finish()
        return True
    return False


class _Relay:
    """Takes what a control side says of a session."""

    role = "provider"

    def start(self, on_control: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self.on_control = on_control

    def send_control(self, payload: bytes, *, after_data: bool = False) -> None:
        pass

    def expect_end(self) -> None:
        pass


def control_messages(data: bytes) -> bool:
    """Lines of the supervisors' messages during a session, one after the other."""
    relay = _Relay()
    side = control.Control(relay)  # type: ignore[arg-type]
    with contextlib.suppress(WireError):
        for message in data.split(b"\n"):
            relay.on_control(message)
        return True
    assert side.peer_bye is None or side.peer_bye.reason.isprintable()
    return False


def manifest(data: bytes) -> bool:
    """Return a client's request to open a session, and what a worker would be told of it."""
    with contextlib.suppress(DecodeError, WireError, ManifestMismatch):
        asked = control_plane._manifest(OpenRequest.FromString(data).manifest)
        name, echoed = asked_model(asked)
        agree(asked, with_nonce(_OWN | echoed))
        agree({**_OWN, **asked}, with_nonce(_OWN | echoed))
        assert name.isprintable()
        return True
    return False


def models_answer(data: bytes) -> bool:
    """Return what a provider calls its models."""
    with contextlib.suppress(DecodeError, WireError):
        names = checked_names([model.name for model in ModelsAnswer.FromString(data).models])
        assert all(map(is_name, names)) and len(set(names)) == len(names)
        return bool(names)
    return False


def request(data: bytes) -> bool:
    """Return a completion's request, as fields of a manifest."""
    with contextlib.suppress(ValueError, RecursionError, InputError):
        fields = json.loads(data)
        if isinstance(fields, dict):
            COMPLETION.check(COMPLETION.asked(fields), PRIVATE)
            return True
    return False


def messages(data: bytes) -> bool:
    """Return what comes on a channel from worker to worker: messages, then an end."""
    heard = b""
    with contextlib.suppress(PeerError):
        for message in messages_of(data):
            heard += len(message).to_bytes(NUMBER_BYTES, "little") + message
        assert heard == data[:_AT_ONCE]
        return True
    assert data.startswith(heard)
    return False


def messages_of(data: bytes) -> Iterator[bytes]:
    """Return the messages of a channel that gets these bytes, as many as a socket takes;
    PeerError.
    """
    ends = socket.socketpair()
    with closing(StreamChannel(ends[0], 1.0)) as channel, ends[1] as peer:
        left = len(data[:_AT_ONCE])
        peer.sendall(data[:_AT_ONCE])
        peer.shutdown(socket.SHUT_WR)
        while left:
            yield (message := channel.recv())
            left -= NUMBER_BYTES + len(message)


class _Once:
    """A channel that has one message."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def send(self, data: bytes) -> None:
        pass

    def recv(self) -> bytes:
        return self._message


def sealed(data: bytes) -> bool:
    """Return a message between workers; nobody who lacks the key makes one."""
    try:
        SealedChannel(_Once(data), bytes(32), 0).recv()
    except WireError:
        return False
    raise AssertionError("a message without the key's tag was taken")


def inventory(data: bytes) -> bool:
    """Return what the other party says of its pool."""
    with contextlib.suppress(WireError):
        actual = _read_inventory(data)
        assert all(type(used) is int and used >= 0 for used in actual.values())
        return True
    return False


def peer_id(data: bytes) -> bool:
    """Parse the id by which the other party names itself."""
    with contextlib.suppress(WireError, PoolError):
        folder = agree_on_folder(_Once(data), _FOLDER / "pool")
        assert folder is None or folder.parent == _FOLDER / "pool"
        return folder is not None
    return False


def batch(data: bytes) -> bool:
    """Return a batch on disk: two lines, fields of its label and of its state, under right
    seals.
    """
    folder = _FOLDER / "batches"
    first, _, second = data.partition(b"\n")
    with contextlib.suppress(PoolError):
        path = folder / files._folder_name(_LABEL.name) / _LABEL.id
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for at, text, owner in (("meta.json", first, ""), ("state.json", second, _LABEL.id)):
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(fields := json.loads(text), dict):
                    text = contents.sealed(fields, owner)
            (path / at).write_bytes(text)
            (path / at).chmod(0o600)
        if not (results := path / "results.npy").exists():
            np.save(results, np.zeros((_LABEL.units, _LABEL.words), np.uint64))
            results.chmod(0o600)
        files.load(path)
        return True
    return False


def safetensors(data: bytes) -> bool:
    """Return the file of a model's weights."""
    return _loads(load_model, "weights", "model.safetensors", data)


def model_config(data: bytes) -> bool:
    """Return the file that declares a model's shape."""
    return _loads(load_model, "config", "config.json", data)


def tokenizer(data: bytes) -> bool:
    """Return a tokenizer's file."""
    return _loads(Tokenizer.load, "tokenizer", "tokenizer.json", data)


def text_format(data: bytes) -> bool:
    """Return what a provider says of how its model's text is written."""
    with contextlib.suppress(InputError):
        actual = TextFormat.parse(data)
        assert actual.tokenizer.decode(actual.tokenizer.encode("a", goes_on=True)) is not None
        assert (
            actual.tokenizer.eos_ids and max(actual.tokenizer.eos_ids) < actual.tokenizer.vocab_size
        )
        return True
    return False


def gguf(data: bytes) -> bool:
    """Return a file to import: what is taken can be loaded, and of what is refused nothing is
    left.
    """
    folder = _FOLDER / "gguf"
    folder.mkdir(exist_ok=True)
    file, out = folder / "model.gguf", folder / "out"
    file.write_bytes(data)
    with contextlib.suppress(InputError):
        import_model(file, out)
        load_model(out)
        Tokenizer.load(out)
        shutil.rmtree(out)
        return True
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]
    return False


def shards(data: bytes) -> bool:
    """Return the index of weights in several files."""
    directory = _model("shards")
    if (directory / "model.safetensors").exists():
        (directory / "model.safetensors").rename(directory / _SHARD)
    return _loads(load_model, "shards", "model.safetensors.index.json", data)


def _loads(load: Callable[[Path], object], target: str, file: str, data: bytes) -> bool:
    directory = _model(target)
    (directory / file).write_bytes(data)
    with contextlib.suppress(InputError):
        load(directory)
        return True
    return False


def certificates(data: bytes) -> bool:
    """Return the file of `--trust`."""
    own, trust = _FOLDER / "identity", _FOLDER / "trust.pem"
    if not own.exists():
        identity.make(own, "fuzz.example", 30)
    trust.write_bytes(data)
    with contextlib.suppress(InputError):
        identity.load(own, trust)
        return True
    return False


def options(data: bytes) -> bool:
    """Return the file of `--config`."""
    path = _FOLDER / "options.toml"
    path.write_bytes(data)
    with contextlib.suppress(InputError):
        config.with_file("serve", ["--config", str(path)], _OPTIONS)
        return True
    return False


def _model(name: str) -> Path:
    """Return a directory with a model and its tokenizer, for one target."""
    directory = _FOLDER / name
    if not directory.exists():
        save_model(directory, _SMALL, tiny_params(_SMALL, 1))
        save_tokenizer(directory)
    return directory


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen")
    parser.add_argument("--sessions", type=int)
    named_models.add_option(parser)
    parser.add_argument("--stop", action="append", default=[])
    parser.add_argument("--once", action="store_true")
    return parser


_OPTIONS = _parser()._actions
_LABEL = Label("0" * 32, "triple", 0, 4, 3, ("0" * 64,))
_STATE = State(0, 0, bytes(32))
_BOUNDARY = split_boundary.Boundary(4, "float16")
_SMALL = GPT2Config(VOCAB, n_positions=8, n_embd=4, n_layer=1, n_head=1)


class _Arrived:
    """A stream of these bytes, in pieces, which then ends."""

    def __init__(self, data: bytes) -> None:
        self._left = data

    def recv_within(self, max_bytes: int, timeout_s: float) -> bytes:
        part, self._left = self._left[:50], self._left[50:]
        return part

    def send_all(self, data: bytes) -> None:
        pass

    def send_within(self, data: bytes, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def vault(data: bytes) -> bool:
    """Return what a vault hears of its user, and an engine of a vault: a wish, then all tokens."""
    with contextlib.suppress(InputError, PeerError):
        messages = Messages(_Arrived(data), "the user")  # type: ignore[arg-type]
        asked: told.VaultRequest = told.told(
            told.VaultRequest, messages.hear("prompts"), "the user"
        )
        told.check_asked(asked, PRIVATE)
        (tokens,) = messages.take((sum(asked.lengths),), dtype=np.int32)
        assert len(tokens) <= PRIVATE.context * told.MAX_LANES
        return True
    return False


def boundary(data: bytes) -> bool:
    """Return a tensor at the boundary of a split model."""
    with contextlib.suppress(WireError):
        actual = _BOUNDARY.decode(data, split_boundary.Kind.UP, 3, 2, 5)
        assert actual.shape == (2, 5, 4) and np.all(np.isfinite(actual))
        assert _BOUNDARY.encode(split_boundary.Kind.UP, 3, actual) == data
        return True
    return False


def sampled(data: bytes) -> bool:
    """Return what a program that samples answers to a request for two texts."""
    with contextlib.suppress(PeerError):
        return len(read_answer(data, 2, "it")) == 2
    return False


def completion(data: bytes) -> bool:
    """Return what an endpoint does."""
    with contextlib.suppress(PeerError):
        return len(read_completion(data, 2, "it")) in (1, 2)
    return False


def _private_file(name: str, data: bytes) -> Path:
    path = _FOLDER / name
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def mark(data: bytes) -> bool:
    """Return the key of a watermark."""
    with contextlib.suppress(InputError):
        return bool(read_key(_private_file("mark", data)).key.secret)
    return False


_MARK = Key(bytes(32))


def mark_history(data: bytes) -> bool:
    """Return which n-grams it marked; what was torn off while it was begun is as good as none."""
    path = _private_file("history", data)
    with contextlib.suppress(InputError), HistoryFile(path, _MARK) as kept:
        return len(kept) > 0
    return False


TARGETS: dict[str, Callable[[bytes], bool]] = {
    target.__name__: target
    for target in (
        frames,
        control_messages,
        manifest,
        models_answer,
        request,
        messages,
        sealed,
        inventory,
        peer_id,
        batch,
        safetensors,
        shards,
        model_config,
        tokenizer,
        gguf,
        text_format,
        certificates,
        options,
        vault,
        boundary,
        sampled,
        completion,
        mark,
        mark_history,
    )
}


def _gguf() -> bytes:
    config = LlamaConfig(VOCAB, 16, 8, 8, 1, 2, 2)
    path = _model("seed") / "model.gguf"
    write_gguf(path, config, tensors(config, tiny_params(config, 1)), _model("seed"))
    return path.read_bytes()


def _label_and_state() -> bytes:
    from dataclasses import asdict

    label = json.dumps({"format": files.FORMAT, **asdict(_LABEL)})
    return (label + "\n" + json.dumps({**asdict(_STATE), "key": _STATE.key.hex()})).encode()


def _sealed_message() -> bytes:
    ends = MemoryChannel.pair()
    SealedChannel(ends[0], bytes([1]) * 32, 1).send(b"words")
    return ends[1].recv()


def _pem() -> bytes:
    own = _FOLDER / "seed-identity"
    if not own.exists():
        identity.make(own, "seed.example", 30)
    return (own / identity.CERTIFICATE).read_bytes()


_WISH = (
    b'{"type":"prompts","lengths":[6,6],"public":[0],"max_new_tokens":3,"temperature":0.5,'
    b'"fakes":[2,3],"own":1,"seed":null}'
)
SEEDS: dict[str, Callable[[], bytes]] = {
    "frames": lambda: (
        PREAMBLE
        + b"".join(
            encode(Frame(kind, 1, payload))
            for kind, payload in ((Kind.OPEN, b"\1"), (Kind.DATA, b"abc"), (Kind.CLOSE, b"\0"))
        )
    ),
    "control_messages": lambda: (
        b'{"type":"ticket","ticket":"00"}\n{"type":"ping","progress":3}\n'
        b'{"type":"bye","reason":"done","ok":true}'
    ),
    "manifest": lambda: OpenRequest(
        manifest=control_plane._values(
            {**with_nonce(_OWN), "request.q": None, "request.t": 0.5, "served_model": "large"}
        )
    ).SerializeToString(),
    "models_answer": lambda: ModelsAnswer(
        models=[ModelInfo(name="small"), ModelInfo(name="large-2.b_c")]
    ).SerializeToString(),
    "request": lambda: (
        b'{"prompt_tokens":5,"max_new_tokens":5,"draft_length":1,"temperature":0.7,'
        b'"verify":"token","top_k":0,"top_p":1.0,"show_progress":false,'
        b'"public_prefix":"7,8","candidates":2}'
    ),
    "messages": lambda: b"\3" + bytes(7) + b"abc" + bytes(8) + b"\1" + bytes(8),
    "sealed": _sealed_message,
    "inventory": lambda: json.dumps({"0" * 32: 3}).encode(),
    "peer_id": lambda: b"0" * 32,
    "batch": _label_and_state,
    "safetensors": lambda: (_model("seed") / "model.safetensors").read_bytes(),
    "shards": lambda: json.dumps(
        {"weight_map": dict.fromkeys(load_file(_model("seed") / "model.safetensors"), _SHARD)}
    ).encode(),
    "gguf": _gguf,
    "model_config": lambda: (_model("seed") / "config.json").read_bytes(),
    "tokenizer": lambda: (_model("seed") / "tokenizer.json").read_bytes(),
    "text_format": lambda: TextFormat.of_model(_model("seed")).document,
    "certificates": _pem,
    "vault": lambda: (
        PREAMBLE
        + encode(Frame(Kind.CONTROL, 0, _WISH))
        + encode(Frame(Kind.DATA, 1, bytes(4 * 12)))
    ),
    "boundary": lambda: _BOUNDARY.encode(
        split_boundary.Kind.UP, 3, np.linspace(-2, 2, 40, dtype=np.float32).reshape(2, 5, 4)
    ),
    "sampled": lambda: (
        b'{"sequences": [{"text": "a", "ended": false}, {"text": "", "ended": true}]}'
    ),
    "completion": lambda: (
        b'{"choices": [{"text": "a", "finish_reason": "stop"}, {"text": "b", '
        b'"finish_reason": "length"}]}'
    ),
    "mark": lambda: (
        b'{"format": 1, "key": "' + b"5a" * 32 + b'", "family": {"name": "uniform", '
        b'"k": 1}, "ngram": 4, "units": "words", "method": "candidates", "tokenizer": ""}'
    ),
    "mark_history": lambda: (
        b"spu-llm watermark history 1 " + _MARK.fingerprint().hex().encode() + b"\n" + bytes(16)
    ),
    "options": lambda: (
        b'[serve]\nmodel = ["a=b", "c"]\nlisten = "h:1"\nsessions = 4\nstop = ["a"]\nonce = true\n'
    ),
}
