"""What the study of confidential prompting is run on: excerpts, and a larger model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from experiments.benchmarks.scale import Shape
from experiments.confidential import worker
from models.files import TOKENIZER_FILE
from models.hf import load_config, save_model
from models.tokenizer import Tokenizer
from models.training.snippets import read_snippets
from spu_llm.core.errors import InputError

AT_ONCE = 32  # texts of the reference
_CLEAR = 1e-3  # between the two largest logits of each token of a text that is compared


class Texts:
    """Excerpts of held-out files whose greedy text neither ends early nor hangs on rounding."""

    def __init__(self, model: Path) -> None:
        self._engine = worker.engine_of(model, AT_ONCE)
        tokenizer = Tokenizer.load(model)
        self._eos = tokenizer.eos_ids
        self._tokens = [tokenizer.encode(s.text) for s in read_snippets()]
        self._found: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {}

    def get(self, count: int, length: int, new: int) -> list[tuple[list[int], list[int]]]:
        """Return prompts of this length, each with the `new` tokens after it. InputError when there
        are fewer than `count`.
        """
        texts = self._found.setdefault((length, new), [])
        if len(texts) < count:
            texts[:] = []
            windows = self._windows(length)
            while len(texts) < count:
                rows = [row for _, row in zip(range(AT_ONCE), windows, strict=False)]
                if not rows:
                    raise InputError(f"the held-out files have too few prompts of {length} tokens")
                texts += self._clear(rows, new)
        return texts[:count]

    def _windows(self, length: int) -> Iterator[list[int]]:
        longest = max(map(len, self._tokens))
        for start in range(0, longest - length + 1, length):
            for tokens in self._tokens:
                if start + length <= len(tokens):
                    yield tokens[start : start + length]

    def _clear(self, rows: list[list[int]], new: int) -> Iterator[tuple[list[int], list[int]]]:
        steps, gaps = [], []
        for tokens, logits in worker.texts(self._engine, rows, new):
            two = np.partition(logits, -2, axis=-1)[:, -2:]
            steps.append(tokens)
            gaps.append(two[:, 1] - two[:, 0])
        smallest = np.min(gaps, axis=0)
        for row, text, gap in zip(rows, zip(*steps, strict=True), smallest, strict=True):
            if gap > _CLEAR and not self._eos & set(text):
                yield row, list(text)


@contextmanager
def larger_model(tokenizer: Path, shape: tuple[int, int, int]) -> Iterator[Path]:
    """Yield a model directory with random weights, and the tokenizer and context of `tokenizer`'s
    directory.
    """
    config = load_config(tokenizer)
    layers, width, heads = shape
    scale = Shape(layers, width, heads, config.vocab_size, config.context, 1, 1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), scale.config, scale.weights())
        shutil.copy(tokenizer / TOKENIZER_FILE, folder)
        yield Path(folder)
