"""Token windows for training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer

END = 0  # id of <|endoftext|>, which opens every document
DOCUMENT_START_SHARE = 0.05
LINE_START_SHARE = 0.20


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Encode each text as int32 ids after an end-of-text token."""
    encoded = tokenizer.encode_batch(list(texts))
    return [np.array([END, *document.ids], np.int32) for document in encoded]


def line_starts(tokenizer: Tokenizer, stream: np.ndarray) -> np.ndarray:
    """Return the positions in `stream` where a line begins, as a user's prompt does."""
    ends_line = np.array(
        [tokenizer.decode([i]).endswith("\n") for i in range(tokenizer.get_vocab_size())]
    )
    return np.flatnonzero(ends_line[stream[:-1]]) + 1


def consecutive_windows(documents: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Concatenate the documents and cut them into windows [window, length] that overlap by one
    token.
    """
    stream = np.concatenate(documents)
    count = (len(stream) - 1) // (length - 1)
    return stream[_spans(np.arange(count) * (length - 1), length)]


def batches(
    tokenizer: Tokenizer,
    documents: Sequence[np.ndarray],
    length: int,
    batch: int,
    rng: np.random.Generator,
) -> Iterator[np.ndarray]:
    """Yield endless batches [batch, length] of windows of shuffled documents.

    Most windows tile the text once per epoch at a random offset; the rest begin at a document or
    at a line, because prompts do.
    """
    while True:
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        last = len(stream) - length
        tiles = np.arange(rng.integers(length - 1), last, length - 1)
        starts = (
            (np.flatnonzero(stream == END), DOCUMENT_START_SHARE),
            (line_starts(tokenizer, stream), LINE_START_SHARE),
        )
        tiled = 1 - DOCUMENT_START_SHARE - LINE_START_SHARE  # their share
        more = [rng.choice(at, round(len(tiles) * share / tiled)) for at, share in starts]
        chosen = rng.permutation(np.minimum(np.concatenate([tiles, *more]), last))
        for i in range(0, len(chosen) - batch + 1, batch):
            yield stream[_spans(chosen[i : i + batch], length)]


def _spans(starts: np.ndarray, length: int) -> np.ndarray:
    return starts[:, None] + np.arange(length)
