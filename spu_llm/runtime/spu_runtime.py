"""SPU behind one class: settings, executables, and the translation of shares.

The only module that imports `spu`. A segment goes in as a jaxpr with this party's values and comes
out as this party's values with what it cost, read from SPU's own profile.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import spu
import spu.libspu as libspu
from jax.experimental import enable_x64
from spu.utils import frontend

from spu_llm.compiler.plan import Run, make_plan
from spu_llm.core._jax import Var, as_function, shape_of
from spu_llm.core.channel import Traffic
from spu_llm.core.correlation import Correlation, Form, Part
from spu_llm.core.errors import LeakError, WorkerError
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    ROLES,
    Arith,
    Bool,
    Owner,
    Private,
    Public,
    Value,
    decode,
    frac_bits_of,
)


def runtime_config(config: SpuConfig, *, profile: bool) -> libspu.RuntimeConfig:
    """Return SPU's own settings object; `profile` writes each segment's traffic to the log."""
    settings = config.settings() | {"enable_pphlo_profile": profile}
    parsed = libspu.RuntimeConfig()
    assert parsed.ParseFromJsonString(json.dumps(settings))
    return parsed


_LOG_ROOM = 1 << 16  # bytes that a segment's lines fit into


class SpuLog:
    """SPU's log file of this process; where a segment's bytes and messages are read from."""

    _PATTERN = re.compile(
        r"Link details: total send bytes (\d+), recv bytes (\d+), "
        r"send actions (\d+), recv actions (\d+)\n"
    )

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="spu-llm-", suffix=".log")
        os.close(handle)
        self.path = Path(name)
        options = libspu.logging.LogOptions()
        options.enable_console_logger = False
        options.system_log_path = name
        libspu.logging.setup_logging(options)
        self._file = self.path.open("r", errors="replace")
        self.path.unlink()  # the open handles keep it; nothing stays behind

    def read_traffic(self, timeout_s: float = 2.0) -> Traffic:
        """Return the traffic of the segment that just ended (the one new `Link details` line)."""
        deadline = time.monotonic() + timeout_s
        text = ""
        while True:
            text += self._file.read()
            lines = self._PATTERN.findall(text)
            if lines:
                return Traffic(*map(int, lines[-1]))
            if time.monotonic() > deadline:
                if self._has_no_room():
                    raise WorkerError(
                        f"the disk of {self.path.parent} is full, and SPU needs a log there; free "
                        "some of it, or set TMPDIR to another one"
                    )
                raise WorkerError("SPU's log has no traffic line for the last segment")
            time.sleep(0.001)

    def _has_no_room(self) -> bool:
        disk = os.fstatvfs(self._file.fileno())
        return disk.f_bavail * disk.f_frsize < _LOG_ROOM


@functools.cache
def _log_of_process() -> SpuLog:
    return SpuLog()


_DTYPES = {
    np.dtype(np.bool_): libspu.DataType.DT_I1,
    np.dtype(np.int32): libspu.DataType.DT_I32,
    np.dtype(np.uint32): libspu.DataType.DT_U32,
    np.dtype(np.int64): libspu.DataType.DT_I64,
    np.dtype(np.float32): libspu.DataType.DT_F32,
    np.dtype(np.float64): libspu.DataType.DT_F64,
}


class ShareCodec:
    """Between a `Value` and SPU's share object; the only reader of `storage_type`."""

    def __init__(self, rank: int, config: SpuConfig) -> None:
        self._rank, self._config = rank, config
        self._io = spu.Io(2, runtime_config(config, profile=False))

    def to_spu(self, value: Value) -> libspu.Share:
        if isinstance(value, Public):
            return self._io.make_shares(_contiguous(value.value), libspu.Visibility.VIS_PUBLIC)[
                self._rank
            ]
        if isinstance(value, Private):
            # The other party knows the shape only and fills its side with zeros.
            plain = value.value if value.value is not None else np.zeros(value.shape, value.dtype)
            visibility = libspu.Visibility.VIS_SECRET
            return self._io.make_shares(_contiguous(plain), visibility, value.owner)[self._rank]
        if isinstance(value, Arith) and value.bits != 64:
            raise ValueError(f"a segment takes shares of 64 bits, found {value.bits}; widen them")
        ring = self._config.field
        form = f"AShr<{ring}>" if isinstance(value, Arith) else f"BShr<{ring},{value.bits}>"
        return _pack(value, f"{self._config.protocol.lower()}.{form}")

    def from_spu(self, share: libspu.Share, dtype: np.dtype) -> Value:
        meta = libspu.ValueMeta()
        meta.ParseFromString(share.meta)
        shape = tuple(meta.shape.dims)
        kind = meta.storage_type
        frac_bits = frac_bits_of(dtype, self._config.frac_bits)
        if kind.startswith("Pub2k"):
            raise LeakError("a segment returned a public value; open it through `reveal`")
        words = _unpack(share, shape)
        if kind.startswith("Priv2k"):
            owner = int(kind.rstrip(">").rsplit(",", 1)[1])
            plain = decode(words, dtype, frac_bits) if owner == self._rank else None
            return Private(owner, shape, dtype, plain)
        if ".AShr<" in kind:
            return Arith(words, dtype, frac_bits)
        if ".BShr<" in kind:
            bits = int(kind.rstrip(">").rsplit(",", 1)[1])
            return Bool(words, dtype, frac_bits, bits)
        raise WorkerError(f"SPU returned a share of unknown form {kind}")


def _contiguous(x: np.ndarray) -> np.ndarray:
    return np.array(x, order="C", copy=True)


def _pack(value: Arith | Bool, storage_type: str) -> libspu.Share:
    meta = libspu.ValueMeta()
    meta.data_type = _DTYPES[value.dtype]
    meta.visibility = libspu.Visibility.VIS_SECRET
    meta.shape = list(value.shape)
    meta.storage_type = storage_type
    chunk = libspu.ValueChunk()
    content = np.ascontiguousarray(value.words).tobytes()
    chunk.total_bytes, chunk.chunk_offset, chunk.content = len(content), 0, content
    share = libspu.Share()
    share.meta = meta.SerializeToString()
    share.share_chunks = [chunk.SerializeToString()]
    return share


def _unpack(share: libspu.Share, shape: tuple[int, ...]) -> np.ndarray:
    contents = []
    for data in share.share_chunks:
        chunk = libspu.ValueChunk()
        chunk.ParseFromString(data)
        contents.append(chunk.content)
    return np.frombuffer(b"".join(contents), np.uint64).reshape(shape)


def _which(value: Value) -> Any:
    """Return a key of the plaintext that SPU may have already; None for what is always set: shares,
    which are fresh, and the client's inputs, since the time would tell whether they are as before.
    """
    if isinstance(value, Public):
        return value.digest
    if isinstance(value, Private) and value.owner == PROVIDER:
        # At the other party there is no content: every value is as good as another.
        content = value.digest if value.value is not None else ""
        return value.owner, value.shape, value.dtype, content
    return None


@dataclass(frozen=True)
class Program:
    """A compiled segment; names of inputs and outputs start with a digest of its content."""

    executable: libspu.Executable
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    output_dtypes: tuple[np.dtype, ...]


_programs: dict[str, Program] = {}  # by digest of the content
_compiling = threading.Lock()


def compile_segment(run: Run, owner_of: Mapping[Var, Owner]) -> Program:
    """Compile an SPU segment, once per content in this process."""
    public = [owner_of[v] is Owner.PUBLIC for v in run.inputs]
    digest = hashlib.sha256(f"{run.digest}|{public}".encode()).hexdigest()[:16]
    with _compiling:
        if digest not in _programs:
            _programs[digest] = _compiled(run, public, digest)
    return _programs[digest]


def _compiled(run: Run, public: Sequence[bool], digest: str) -> Program:
    body = as_function(run.jaxpr)

    def segment(*args: Any) -> list[Any]:
        return body(*args)

    inputs = tuple(f"{digest}.in{i}" for i in range(len(run.inputs)))
    outputs = tuple(f"{digest}.out{i}" for i in range(len(run.outputs)))
    visibility = [
        libspu.Visibility.VIS_PUBLIC if is_public else libspu.Visibility.VIS_SECRET
        for is_public in public
    ]
    options = libspu.CompilerOptions()
    # Otherwise x / sum computes a reciprocal of x's full size.
    options.enable_optimize_denominator_with_broadcast = True
    shapes = [shape_of(v) for v in run.inputs]
    executable, _ = frontend.compile(
        frontend.Kind.JAX,
        segment,
        shapes,
        {},
        list(inputs),
        visibility,
        lambda _: list(outputs),
        copts=options,
    )
    dtypes = tuple(np.dtype(shape_of(v).dtype) for v in run.outputs)
    return Program(executable, inputs, outputs, dtypes)


def _compile_whole(
    fn: Callable[..., list[Any]], values: Sequence[Value]
) -> tuple[Program, list[int]]:
    """Compile a function that is one segment; return its program, and which value each input is."""
    # All of it in SPU, what works on one party's words too: that is how memory stays bounded.
    owners = [Owner.JOINT] * len(values)
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
    plan = make_plan(fn, shapes, owners, only_segments=True)
    (run,) = plan.steps
    assert isinstance(run, Run) and run.outputs == plan.outputs
    return compile_segment(run, plan.owner_of), [plan.inputs.index(v) for v in run.inputs]


class SpuRuntime:
    """One party's SPU virtual machine on an established link."""

    def __init__(self, link: Any, config: SpuConfig, *, profile: bool = True) -> None:
        self.rank = link.rank
        self._log = _log_of_process() if profile else None
        self._runtime = spu.Runtime(link, runtime_config(config, profile=profile))
        self._codec = ShareCodec(link.rank, config)
        self._resident: dict[str, Any] = {}  # by an input's name: which value SPU has there
        self._correlations: dict[str, tuple[Program, list[int]]] = {}

    def run(
        self, program: Program, inputs: Sequence[Value], *, keep: bool = True
    ) -> tuple[list[Value], Traffic]:
        """Run a segment. LeakError when it returns a value that SPU made public.

        `keep`: inputs stay in SPU, where plaintext of equal content (weights, at every step) need
        not be set again.
        """
        for name, value in zip(program.input_names, inputs, strict=True):
            which = _which(value) if keep else None
            if which is None or self._resident.get(name) != which:
                self._runtime.set_var(name, self._codec.to_spu(value))
                self._resident[name] = which
        self._runtime.run(program.executable)
        outputs = []
        for name, dtype in zip(program.output_names, program.output_dtypes, strict=True):
            outputs.append(self._codec.from_spu(self._runtime.get_var(name), dtype))
            self._runtime.del_var(name)
        if not keep:
            for name in program.input_names:
                self._runtime.del_var(name)
                self._resident.pop(name)
        return outputs, self._log.read_traffic() if self._log else Traffic()

    def make(
        self, correlation: Correlation, masks: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], Traffic]:
        """Make one chunk of a correlation; return this party's result words, and what they cost."""
        units = len(masks[0])
        inputs = zip(correlation.input_parts(), correlation.derive(*masks), strict=True)
        values = [self._as_value(part, words) for part, words in inputs]
        key = f"{correlation.name}|{units}"
        if key not in self._correlations:
            with enable_x64():  # whole ring words, where models compute with 32 bits
                self._correlations[key] = _compile_whole(
                    lambda *xs: list(correlation.secure(*xs)), values
                )
        program, order = self._correlations[key]
        results, traffic = self.run(program, [values[i] for i in order], keep=False)
        words = []
        for part, result in zip(correlation.results, results, strict=True):
            # SPU chooses the form of a share; any other than the declared one would add up wrong.
            wanted = Bool if part.form is Form.BOOL else Arith
            if not isinstance(result, wanted):
                raise WorkerError(f"SPU made {correlation.name} as {result}, not {wanted.__name__}")
            words.append(result.words)
        return words, traffic

    def _as_value(self, part: Part, words: np.ndarray) -> Value:
        assert words.shape[1:] == part.shape
        integer = np.dtype(np.int64)
        if part.form is Form.PRIVATE:
            plain = words.view(np.int64) if part.holder.rank == self.rank else None
            return Private(part.holder.rank, words.shape, integer, plain)
        if part.form is Form.ARITH:
            return Arith(words, integer, 0)
        if part.form is Form.BIT:
            return Bool(words, np.dtype(np.bool_), 0, 1)
        return Bool(words, integer, 0, 64)

    def warm_up(self) -> Traffic:
        """Set up oblivious transfer and encryption contexts before the first secret is used."""

        def touch(x: Any, y: Any) -> list[Any]:
            product = x * y
            return [jnp.where(product < 0, product * product, product)]

        ones = np.ones(4, np.float32)
        values = [
            Private(rank, ones.shape, ones.dtype, ones if rank == self.rank else None)
            for rank in (CLIENT, PROVIDER)
        ]
        program, order = _compile_whole(touch, values)
        return self.run(program, [values[i] for i in order])[1]


def create_link(rank: int, addresses: Sequence[str], *, timeout_ms: int) -> Any:
    """Open a link to the peer over TCP; `addresses[rank]` is bound, the peer's is called."""
    desc = libspu.link.Desc()
    desc.recv_timeout_ms = timeout_ms
    desc.http_timeout_ms = timeout_ms
    desc.connect_retry_times = 100
    desc.connect_retry_interval_ms = 100
    for role, address in zip(ROLES, addresses, strict=True):
        desc.add_party(role, address)
    return libspu.link.create_brpc(desc, rank)


def create_memory_link(rank: int, name: str) -> Any:
    """Open a link inside one process; both ranks pass the same `name`."""
    desc = libspu.link.Desc()
    desc.id = name
    desc.recv_timeout_ms = 600_000
    for role in ROLES:
        desc.add_party(role, role)
    return libspu.link.create_mem(desc, rank)
