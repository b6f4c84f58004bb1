"""Secrets as bytes, in the forms that a program may keep or send, and where to look for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from models.gpt2 import fold
from models.hf import load_model
from models.tokenizer import Tokenizer
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import encode

Needles = dict[str, bytes]  # what they are -> bytes that appear nowhere else

ROWS = 4  # of the one-hot encoding, and embeddings
BLOCK = 1 << 16
CHUNK = 1 << 22


def prompt_needles(text: str, private: Path) -> Needles:
    """Return the prompt, its tokens, their one-hot rows, and their embeddings in the private
    model.
    """
    ids = np.array(Tokenizer.load(private).encode(text))
    assert len(set(ids.tolist())) > 16, "a prompt that nothing else looks like"
    config, params = load_model(private)
    tokens = {"text": text.encode(), "JSON": ", ".join(map(str, ids)).encode()}
    tokens |= {f"ids as {kind}": data for kind, data in _forms(ids, "int32 int64 uint16").items()}
    one_hot = np.eye(config.vocab_size)[ids[:ROWS]].ravel()
    first, last = np.flatnonzero(one_hot)[[0, -1]]
    for kind, data in _forms(one_hot[first : last + 1], "int8 int32 int64").items():
        tokens[f"one-hot as {kind}"] = data
    for name, weights in (("", params), ("folded ", fold(params, config))):
        rows = np.asarray(weights["wte"])[ids] + np.asarray(weights["wpe"])[: len(ids)]
        for i, row in enumerate(rows[1 : 1 + ROWS]):
            tokens |= {f"{name}embedding {i} as {k}": data for k, data in _forms(row).items()}
    return tokens


def weight_needles(private: Path) -> Needles:
    """Return the middle row and the middle column of each matrix of the model."""
    config, params = load_model(private)
    actual: Needles = {}
    for name, weights in (("", params), ("folded ", fold(params, config))):
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
            matrix = np.asarray(leaf)
            if matrix.ndim < 2:
                continue
            matrix = matrix.reshape(-1, matrix.shape[-1])
            for line, words in (("row", matrix), ("column", matrix.T)):
                window = words[len(words) // 2][1:17]  # without token 0, which is set by hand
                for kind, data in _forms(window).items():
                    actual[f"{name}{jax.tree_util.keystr(path)} {line} as {kind}"] = data
    return actual


def _forms(values: np.ndarray, integers: str = "") -> Needles:
    forms = {kind: values.astype(kind).tobytes() for kind in f"float32 float64 {integers}".split()}
    bits = SpuConfig().frac_bits
    return forms | {f"{bits} fraction bits": encode(np.asarray(values, np.float64), bits).tobytes()}


def search(needles: Mapping[str, bytes], places: Iterable[bytes]) -> set[str]:
    """Names of the needles that are in any of these places."""
    # By the first eight bytes all at once, but for those that begin as half of all memory does.
    common = {name for name, data in needles.items() if data[:8].strip(b"\0") == b"\1"}
    first: dict[int, list[str]] = {}
    for name in needles.keys() - common:
        first.setdefault(int.from_bytes(needles[name][:8], "little"), []).append(name)
    known = np.array(list(first), "u8")
    heads = np.zeros(1 << 16, bool)
    heads[_hash(known)] = True
    longest = max(map(len, needles.values()))

    def inside(place: bytes, start: int) -> set[str]:
        chunk = place[start : start + CHUNK + longest]
        collected: set[str] = set()
        for shift in range(8):
            words = np.frombuffer(chunk[shift : shift + (len(chunk) - shift) // 8 * 8], "u8")
            at = np.flatnonzero(heads[_hash(words)])
            for i in at[np.isin(words[at], known)].tolist():
                names = first[int(words[i])]
                collected |= {n for n in names if chunk.startswith(needles[n], 8 * i + shift)}
        return collected

    collected: set[str] = set()
    # numpy lets threads work side by side; of gigabytes there is one place at a time.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for place in places:
            collected |= {name for name in common if needles[name] in place}
            pieces = [pool.submit(inside, place, start) for start in range(0, len(place), CHUNK)]
            collected = collected.union(*(piece.result() for piece in pieces))
    return collected


def _hash(words: np.ndarray) -> np.ndarray:
    """Return 16 bits of each word, as indices."""
    return ((words * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(48)).view(np.intp)


def memory(pid: int) -> bytes:
    """Return what a process can write, and files without a name that it shares, as they are now,
    less blocks that are all zeros.
    """
    held = bytearray()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        for start, end in _held(pid):
            for at in range(start, end, BLOCK):
                file.seek(at)
                try:
                    block = file.read(min(BLOCK, end - at))
                except OSError:  # the kernel's own, or given back in the meantime
                    break
                if block.count(0) < len(block):
                    held += block
    return bytes(held)


def _held(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        if rights.startswith("rw") or "/memfd:" in line:
            start, _, end = span.partition("-")
            yield int(start, 16), int(end, 16)
