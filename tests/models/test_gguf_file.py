"""Headers of GGUF files byte by byte: what is read, and what is refused by the name of the field or
the tensor that it is in.
"""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.hf import load_model
from models.importing.gguf_file import GgufFile, read_gguf
from models.importing.gguf_values import size_of
from models.importing.run import import_model
from models.llama import LlamaConfig
from spu_llm.core.errors import InputError
from tests.kit.models import VOCAB, save_tokenizer, tiny_params
from tests.models.gguf_files import tensors, write_gguf

U32, I64, F32, BOOL, TEXT, LIST = 4, 11, 6, 7, 8, 9  # kinds of fields


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def field(name: str, kind: int, data: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + data


def tensor(name: str, shape: list[int], start: int, kind: int = 0) -> bytes:
    """Describe a tensor of float32 (kind 0); sizes as the file has them, innermost first."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, start)


def file(
    fields: list[bytes], places: list[bytes], data: bytes = b"", version: bytes = b"\3\0\0\0"
) -> bytes:
    counts = struct.pack("<QQ", len(places), len(fields))
    header = b"GGUF" + version + counts + b"".join([*fields, *places])
    return header + bytes(-len(header) % 32) + data


def read(tmp_path: Path, content: bytes) -> GgufFile:
    (tmp_path / "file.gguf").write_bytes(content)
    return read_gguf(tmp_path / "file.gguf", size_of)


def test_fields_of_every_kind_and_places_of_tensors(tmp_path: Path) -> None:
    numbers = np.array([1, -2, 3], "<i8")
    fields = [
        field("a", U32, struct.pack("<I", 7)),
        field("b", F32, struct.pack("<f", 0.5)),
        field("c", BOOL, b"\2"),
        field("d", TEXT, text("é")),
        field("e", LIST, struct.pack("<IQ", I64, 3) + numbers.tobytes()),
        field("f", LIST, struct.pack("<IQ", TEXT, 2) + text("x") + text("")),
        field("g", LIST, struct.pack("<IQ", BOOL, 2) + b"\0\1"),
    ]
    places = [tensor("second", [4], 32), tensor("first", [2, 3], 0)]
    actual = read(tmp_path, file(fields, places, bytes(48)))
    kept = {name: actual.fields[name] for name in "abcdf"}
    assert kept == {"a": 7, "b": 0.5, "c": True, "d": "é", "f": ["x", ""]}
    np.testing.assert_array_equal(actual.fields["e"], numbers)
    np.testing.assert_array_equal(actual.fields["g"], [False, True])
    assert actual.tensors["first"].shape == (3, 2)  # outermost first
    begin = actual.tensors["first"].start
    assert actual.tensors["second"].start == begin + 32 and begin % 32 == 0
    assert (actual.tensors["first"].size, actual.tensors["second"].size) == (24, 16)


ONE = [tensor("t", [4], 0)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (file([], [], version=b"\1\0\0\0"), "of GGUF version 1"),
        (file([], [], version=b"\0\0\0\3"), "of GGUF version 50331648"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQ", 0, 1 << 63), "counts 9223372036854775808 fields"),
        (b"GGUF\3\0\0\0" + struct.pack("<QQ", 1 << 40, 0), "and 1099511627776 tensors"),
        (file([field("a", 13, b"")], []), 'field "a" is of type 13, which is none'),
        (file([field("a", U32, bytes(4))] * 2, []), 'field "a" is there twice'),
        (file([field("a" * 300, U32, bytes(4))], []), "field 0 has a text of 300 bytes"),
        (file([field("a", TEXT, text(b"\xff"))], []), 'field "a" has a text that is not UTF-8'),
        (file([field("a", TEXT, b"\xff" * 8)], []), 'field "a" has a text of 184467440737'),
        (file([field("a", LIST, struct.pack("<IQ", LIST, 1))], []), 'field "a" is of type 9'),
        (file([field("a", LIST, struct.pack("<IQ", U32, 1 << 62))], []), "has 46116860184"),
        (file([field("a", LIST, struct.pack("<IQ", U32, 9))], []), 'truncated in field "a"'),
        (file([field("a", LIST, struct.pack("<IQ", TEXT, 4000000))], []), 'truncated in field "a"'),
        (file([field("general.alignment", U32, bytes(4))], []), '"general.alignment" is "0"'),
        (file([], [tensor("t", [], 0)], bytes(16)), 'tensor "t" has 0 dimensions'),
        (file([], [tensor("t", [1] * 5, 0)], bytes(16)), 'tensor "t" has 5 dimensions'),
        (file([], [tensor("t", [4, 0], 0)], bytes(16)), 'tensor "t" has the shape [0, 4]'),
        (file([], [tensor("t", [1 << 63, 1 << 63], 0)], bytes(16)), 'tensor "t" has the shape'),
        (file([], [tensor("t", [4], 0, kind=16)], bytes(16)), "of type 16, which cannot be read"),
        (file([], [tensor("t", [31], 0, kind=8)], bytes(64)), "rows of 31 numbers of type 8"),
        (file([], ONE * 2, bytes(64)), 'tensor "t" is there twice'),
        (file([], [tensor("t", [4], 4)], bytes(64)), 'tensor "t" starts at 4, no multiple of 32'),
        (file([], [*ONE, tensor("u", [4], 0)], bytes(64)), 'tensor "u" lies over tensor "t"'),
        (file([], ONE, bytes(15)), 'tensor "t" ends beyond the end of the file'),
        (file([], [tensor("t", [4], 1 << 63)], bytes(64)), 'tensor "t" ends beyond the end'),
        (file([], [])[:20], "truncated in header"),
        (file([], ONE)[:40], "truncated in tensor"),
    ],
)
def test_what_is_damaged_is_named(tmp_path: Path, content: bytes, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, content)
    message = str(caught.value)
    assert expected in message and str(tmp_path / "file.gguf") in message
    assert "\n" not in message and len(message) < 500


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a file"):
        read_gguf(tmp_path / "pipe", size_of)


def test_a_short_file_takes_little_memory(tmp_path: Path) -> None:
    """However much it says that it holds."""
    lists = [
        field("a", LIST, struct.pack("<IQ", TEXT, 4_000_000)),
        field("a", LIST, struct.pack("<IQ", I64, 4_000_000)),
        field("a", TEXT, struct.pack("<Q", 1 << 20)),
    ]
    for one in lists:
        tracemalloc.start()
        with pytest.raises(InputError, match="truncated"):
            read(tmp_path, file([one], []))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    config = LlamaConfig(VOCAB, 16, 8, 8, 1, 2, 2)
    save_tokenizer(folder)
    write_gguf(folder / "model.gguf", config, tensors(config, tiny_params(config, 1)), folder)
    return folder / "model.gguf"


_NUMBERS = st.sampled_from([0, 1, 2, 255, 1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63, (1 << 64) - 1])


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_other_numbers_in_a_whole_file_are_taken_or_refused(whole: Path, data: Any) -> None:
    """A count, a length, a size or any other number: what is taken can be loaded."""
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        width = data.draw(st.sampled_from([1, 4, 8]))
        # The first kilobyte is fields, the last two before the weights are tensors.
        at = data.draw(st.one_of(st.integers(0, 1000), st.integers(0, len(content) - width)))
        number = data.draw(_NUMBERS) % (1 << 8 * width)
        content[at : at + width] = number.to_bytes(width, "little")
    folder = whole.parent / "changed"
    folder.mkdir(exist_ok=True)
    (folder / "model.gguf").write_bytes(content)
    out = folder / "out"
    with contextlib.suppress(InputError):
        import_model(folder / "model.gguf", out)
        load_model(out)
        for path in out.iterdir():
            path.unlink()
        out.rmdir()
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]
