"""What tuning keeps on disk: the client's secrets, and the provider's LoRA.

    <secrets>/secrets.safetensors   the client's: everything that it needs to go on, or to generate
    <secrets>/loss.jsonl            a line for each round: its number and loss
    <secrets>/lock                  held by the one session that uses the directory

    <tunings>/<id>/<round>.safetensors   the provider's, of the last two rounds that were kept
    <tunings>/<id>/lock

Directories are 0700, files 0600, each written whole or not at all. The provider writes before the
client does, whose round is then always among the provider's last two: wherever either of the two is
killed, both can go on from the client's round, and everything after it comes out as it would have.
A `ClientSecrets` is the key to all text that goes through this model: who has it reads the
boundary. It is never sent or logged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from models.family import ModelConfig, Params, weight_shapes
from models.split import Split
from spu_llm.core.errors import InputError, PoolError
from spu_llm.core.prg import KEY_BYTES
from spu_llm.offline.access import is_locked, take_lock
from spu_llm.offline.durable import replace_whole
from spu_llm.offline.stock import file_bytes
from spu_llm.systems.program import read
from spu_llm.systems.split.ends import without_table
from spu_llm.systems.split.modes import ENDS

if TYPE_CHECKING:
    from spu_llm.systems.split.tuning import ClientHalf, HostHalf

SECRETS, LOSSES, LOCK = "secrets.safetensors", "loss.jsonl", "lock"
MAX_TUNINGS = 64  # that a provider keeps for one client
_ID = re.compile(r"[0-9a-f]{32}")
_FORMAT = 1
_HEADER_BYTES = 1 << 16  # of a file, at most about


@dataclass(frozen=True)
class Settings:
    """Settings of a tuning, which stay the same over all its rounds. id: 32 hex digits, by which
    the provider knows it; ends, texts: digests of what it is of. `mechanism` "none" is without
    codebook; leave_out: "codebook" or "permutation", what noir is without; tuned: "ends", or "back"
    alone.
    """

    id: str
    ends: str
    mode: str
    front: int
    back: int
    mechanism: str
    epsilon: float
    precision: str
    batch: int
    length: int
    learning_rate: float
    lora: int
    texts: str
    leave_out: str = ""
    tuned: str = ENDS

    @property
    def split(self) -> Split:
        return Split(self.front, self.back)

    def check_same(self, asked: Settings) -> None:
        """Raise InputError where a command asks for something else than what was begun."""
        # First what the others follow from: without a codebook there are no mechanism and epsilon.
        for name in ("leave_out", *asdict(self)):
            begun, wanted = getattr(self, name), getattr(asked, name)
            if name != "id" and wanted != begun:
                what = {
                    "ends": "another model",
                    "texts": "other texts",
                    "leave_out": f"{_of_noir(begun)}, not {_of_noir(wanted)}",
                }.get(name)
                raise InputError(
                    "the tuning in --secrets was begun with "
                    + (what or f"{name.replace('_', '-')} {begun}, not {wanted}")
                    + "; give the same as then, or another directory"
                )


def _of_noir(leave_out: str) -> str:
    return f"without its {leave_out}" if leave_out else "the whole of noir"


@dataclass
class ClientSecrets:
    """The client's own. codebook: float32 [vocab, width], in place of the token embedding (not
    folded). permutation: int64 [vocab], tau. front, back: folded weights, without the token table;
    optimiser: what Adam keeps, leaf by leaf. key: of the stream that draws batches. `round` are
    done.
    """

    settings: Settings
    key: bytes
    codebook: np.ndarray
    permutation: np.ndarray
    front: Params
    back: Params
    optimiser: list[np.ndarray]
    round: int

    @property
    def split(self) -> Split:
        return self.settings.split

    @property
    def mechanism(self) -> str:
        return self.settings.mechanism

    @property
    def epsilon(self) -> float:
        """Return the epsilon of the whole codebook: its features' together."""
        return self.settings.epsilon

    def after(self, half: ClientHalf, done: int) -> ClientSecrets:
        """Return these secrets with what `half` has tuned, when `done` rounds are done."""
        weights, state = jax.device_get((half.weights, half.state))
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
        return replace(
            self, front=weights["front"], back=weights["back"], optimiser=leaves, round=done
        )

    def give(self, half: ClientHalf) -> None:
        """Put what was tuned into a half of the same shape; InputError when it does not fit."""
        half.weights = jax.device_put({"front": self.front, "back": self.back})
        try:
            if self.round:
                half.state = _like(half.state, self.optimiser)
        except KeyError:
            raise InputError("the secrets are damaged; restore them from a copy") from None

    def save(self, directory: Path) -> None:
        """Write the secrets durably, or not at all."""
        tensors = {
            "key": np.frombuffer(self.key, np.uint8),
            "codebook": self.codebook,
            "permutation": self.permutation,
            **_named("front", self.front),
            **_named("back", self.back),
            **_named("optimiser", self.optimiser),
        }
        with _failures(directory):
            _write(directory / SECRETS, tensors, {**asdict(self.settings), "round": self.round})

    @staticmethod
    def load(directory: Path, config: ModelConfig) -> ClientSecrets:
        """Load secrets; InputError for what is none of a model of this shape."""
        path = directory / SECRETS
        with _failures(directory):
            tensors, fields = _read(path)
        damaged = InputError(f"{path} is damaged, or of another model; restore it from a copy")
        try:
            round_ = fields.pop("round")
            # Secrets of before these could be chosen have the defaults.
            settings = read(Settings, {"leave_out": "", "tuned": ENDS, **fields}, "")
            shapes = weight_shapes(config)
            front, _, back = settings.split.parts(shapes)
            front, _ = without_table(front, config)
            key = tensors["key"].tobytes()
            codebook, permutation = tensors["codebook"], tensors["permutation"]
            optimiser = _leaves(tensors, "optimiser")
            trees = _tree(tensors, "front", front), _tree(tensors, "back", back)
        except (KeyError, InputError):
            raise damaged from None
        vocab = config.vocab_size
        if (
            len(key) != KEY_BYTES
            or type(round_) is not int
            or round_ < 0
            or codebook.shape != (vocab, config.width)
            or not np.array_equal(np.sort(permutation), np.arange(vocab))
        ):
            raise damaged
        return ClientSecrets(settings, key, codebook, permutation, *trees, optimiser, round_)


class Losses:
    """The curve: a line a round."""

    def __init__(self, directory: Path, done: int) -> None:
        """Open the curve, and forget what was written after `done` rounds."""
        self._path = directory / LOSSES
        with _failures(directory):
            lines = self._path.read_bytes().splitlines(True) if self._path.exists() else []
            replace_whole(self._path, b"".join(lines[:done]))

    def add(self, number: int, loss: float) -> None:
        with _failures(self._path.parent), open(self._path, "ab") as file:
            file.write(json.dumps({"round": number, "loss": loss}).encode() + b"\n")


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Yield while nothing else uses the directory. InputError when something does, or when others
    than its owner may read it.
    """
    own_directory(directory)
    with _failures(directory):
        lock = take_lock(directory / LOCK)
    if lock is None:
        raise InputError(f"{directory} is in use by another session")
    try:
        yield
    finally:
        os.close(lock)


def own_directory(directory: Path) -> None:
    """Make a directory if need be; InputError when others may read it, or it cannot be used."""
    with _failures(directory):
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700, parents=True)
        if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
            raise InputError(f"{directory} is no directory that can be written to")
        status = directory.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise InputError(f"others can read {directory}, which is to hold secrets; chmod 700 it")


# ---- the provider's


class Tunings:
    """The provider's folder of one tuning: LoRA of the last two rounds that were kept."""

    def __init__(self, directory: Path, name: str) -> None:
        """Raise InputError when the directory is full of other tunings, or the id is none."""
        if not _ID.fullmatch(name):
            raise InputError("the client names its tuning by something that is no id")
        self.folder = directory / name
        if not self.folder.exists():
            with _failures(directory):
                count = sum(1 for entry in directory.iterdir() if _ID.fullmatch(entry.name))
            if count >= MAX_TUNINGS:
                raise InputError(
                    f"the provider keeps {count} tunings for this client already; no more"
                )

    def rounds(self) -> list[int]:
        """Return the rounds that are kept, in order."""
        if not self.folder.exists():
            return []
        names = (path.name.partition(".")[0] for path in self.folder.glob("*.safetensors"))
        return sorted(int(name) for name in names if name.isdigit())

    def check_free(self) -> None:
        """Raise InputError while another session uses this tuning."""
        with _failures(self.folder):
            if is_locked(self.folder / LOCK):
                raise InputError(
                    "another session uses the provider's half of this tuning; try again when that "
                    "has ended"
                )

    def check_room(self, blocks: list[Params], rank: int, limits: dict[str, int]) -> None:
        """Raise InputError unless there is room for LoRA of this rank of such blocks, three times
        while it is written; limits: bytes, by the directory that is to have no more in all.
        """
        values = sum(
            rank * sum(matrix["weight"].shape) for block in blocks for matrix in block.values()
        )
        needed = 3 * (3 * 4 * values + _HEADER_BYTES)  # each value, and two of Adam's
        own = file_bytes(self.folder)
        for directory, limit in limits.items():
            if file_bytes(Path(directory)) - own + needed > limit:
                raise InputError(
                    "the provider has no room on disk for this tuning; give a smaller --lora, or "
                    "have it give more (split serve --disk, --client-disk)"
                )

    def check(self, rank: int, done: int) -> None:
        """Raise InputError when the LoRA after `done` rounds is not kept, or of another rank."""
        kept = self.rounds()
        if done not in kept:
            some = ", ".join(map(str, kept)) or "none"
            raise InputError(
                f"the client goes on after round {done} of its tuning, but the provider has "
                f"its own half after rounds {some}; without it the tuning is lost"
            )
        with _failures(self.folder):
            fields = _fields(self._path(done))
        if fields != {"round": done, "rank": rank}:
            raise InputError("the provider's half of this tuning is of another rank")

    def give(self, half: HostHalf, rank: int, done: int) -> None:
        """Put the LoRA after `done` rounds into a half of its shape; InputError as in `check`, or
        when the file is damaged.
        """
        self.check(rank, done)
        with _failures(self.folder):
            tensors, _ = _read(self._path(done))
        try:
            half.lora = jax.device_put(_tree(tensors, "lora", half.lora))
            half.state = _like(half.state, _leaves(tensors, "optimiser"))
        except KeyError:
            raise InputError("the provider's half of this tuning is damaged") from None

    def save(self, half: HostHalf, rank: int, done: int) -> None:
        """Write the half's LoRA durably, or not at all; rounds before the last two are removed."""
        own_directory(self.folder)
        lora, state = jax.device_get((half.lora, half.state))
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
        tensors = {**_named("lora", lora), **_named("optimiser", leaves)}
        with _failures(self.folder):
            _write(self._path(done), tensors, {"round": done, "rank": rank})
            # Rounds above this one are of a run that the client does not go on with.
            kept = [number for number in self.rounds() if number <= done]
            for number in set(self.rounds()) - set(kept[-2:]):
                self._path(number).unlink()

    def _path(self, done: int) -> Path:
        return self.folder / f"{done:08d}.safetensors"


# ---- files


def _write(path: Path, tensors: dict[str, np.ndarray], fields: dict[str, Any]) -> None:
    # One entry of metadata: several would come in any order.
    about = json.dumps({"format": _FORMAT, **fields})
    whole = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    replace_whole(path, save(whole, {"about": about}))


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read tensors and fields; InputError for a file that others may read, or none of ours."""
    with _opened(path) as (file, fields):
        return {name: file.get_tensor(name) for name in file.keys()}, fields


def _fields(path: Path) -> dict[str, Any]:
    """Read a file's fields without its tensors; InputError as in `_read`."""
    with _opened(path) as (_, fields):
        return fields


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    if path.stat().st_mode & 0o077:
        raise InputError(f"others can read {path}, which holds secrets; chmod 600 it")
    try:
        with safe_open(path, "numpy") as file:
            fields = json.loads((file.metadata() or {})["about"])
            if fields.pop("format") != _FORMAT:
                raise ValueError
            yield file, fields
    except (SafetensorError, KeyError, ValueError, AttributeError):
        raise InputError(f"{path} is damaged; restore it from a copy") from None


def _named(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """Return a tree's leaves by the names of their places."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(prefix, path): np.asarray(leaf) for path, leaf in paths}


def _name(prefix: str, path: Any) -> str:
    parts = [str(getattr(step, "key", getattr(step, "idx", step))) for step in path]
    return ".".join([prefix, *parts])


def _tree(tensors: dict[str, np.ndarray], prefix: str, like: Any) -> Any:
    """Return the tree with the places and shapes of `like`; KeyError when it is not all there."""
    paths, form = jax.tree_util.tree_flatten_with_path(like)
    leaves = [tensors[_name(prefix, path)] for path, _ in paths]
    if any(tensor.shape != leaf.shape for tensor, (_, leaf) in zip(leaves, paths, strict=True)):
        raise KeyError(prefix)
    return jax.tree.unflatten(form, leaves)


def _leaves(tensors: dict[str, np.ndarray], prefix: str) -> list[np.ndarray]:
    """Return a list of leaves that `_named` took apart."""
    count = sum(name.startswith(f"{prefix}.") for name in tensors)
    return [tensors[f"{prefix}.{i}"] for i in range(count)]


def _like(tree: Any, leaves: list[np.ndarray]) -> Any:
    """Return these leaves in the form of `tree`; KeyError when they do not fit."""
    own, form = jax.tree.flatten(tree)
    if [np.shape(a) for a in own] != [a.shape for a in leaves]:
        raise KeyError("optimiser")
    return jax.device_put(jax.tree.unflatten(form, leaves))


@contextmanager
def _failures(directory: Path) -> Iterator[None]:
    """Yield, and turn what the system refuses into an InputError."""
    try:
        yield
    except OSError as exc:
        path = exc.filename or directory
        raise InputError(f"cannot use {path}: {exc.strerror or exc}") from None
    except PoolError as exc:
        raise InputError(str(exc)) from None
