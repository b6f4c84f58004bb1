"""Texts of a chat model for studies: what is public of each, and what goes on shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.fidelity.logits import compiled_in_pieces
from models.cache import Block, lengthened, rows_after
from models.chat import Template, cut
from models.family import ModelConfig, Params, family_of
from models.tokenizer import Tokenizer
from spu_llm.app.calibration_texts import messages_in
from spu_llm.core.errors import InputError

_LEAST = 32  # tokens of a text that is compiled for


@dataclass(frozen=True)
class ChatText:
    """A chat that the model goes on with. kind: of its words, as its file says; head: tokens that
    are public; rest: those on shares.
    """

    kind: str
    words: str  # of its last message
    head: list[int]
    rest: list[int]


def chat_texts(directory: Path, files: Sequence[Path]) -> list[ChatText]:
    """Return the chats of JSON Lines files, each by the model's template. InputError for files that
    cannot be read, and for chats that begin in different ways.
    """
    template, tokenizer = Template.load(directory), Tokenizer.load(directory)
    texts = []
    for path in files:
        for chat, messages in messages_in(path):
            head, rest = (tokenizer.encode(t, goes_on=True) for t in cut(template.render, messages))
            kind = str(chat.get("kind", "chat"))
            texts.append(ChatText(kind, messages[-1].content, head, rest))
    if any(text.head != texts[0].head for text in texts):
        raise InputError("the chats begin in different ways; leave out those with system messages")
    return texts


class Forward:
    """Logits of texts that begin with the same public tokens, which run in the clear: exactly, or
    by the pieces that functions have on shares. Texts are padded to few lengths with themselves,
    since each is compiled for; no row sees the padding.
    """

    def __init__(
        self, config: ModelConfig, params: Params, public: Sequence[int], *, pieces: bool
    ) -> None:
        self._config, self._family = config, family_of(config)
        leaves, self._tree = jax.tree.flatten(self._family.fold(params, config))
        self._leaves = [jax.device_put(leaf) for leaf in leaves]
        self._public, self._pieces = len(public), pieces
        self._before = self._beginning(public) if public else None
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._sites: list[str] = []  # of what is counted, in order; the same for all lengths

    def __call__(self, tokens: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        """Return the logits float32 [n, vocab] after each of n tokens, and the sites whose range a
        row left. InputError when they do not fit the model.
        """
        n, size = len(tokens), _LEAST
        while size < n:
            size *= 2
        if self._public + size > self._config.context:
            raise InputError(f"{n} tokens do not fit the model's context")
        if size not in self._compiled:
            self._compiled[size] = self._compile(size)
        padded = np.resize(np.asarray(tokens, np.int32), size)
        rows, outside = self._compiled[size](padded, *self._cached(), *self._leaves)
        left = [site for site, count in zip(self._sites, outside, strict=True) if count]
        return np.asarray(rows)[:n], left

    def _cached(self) -> list[jax.Array]:
        return [] if self._before is None else [*self._before.keys, *self._before.values]

    def _beginning(self, public: Sequence[int]) -> Block:
        """Run the public tokens; return their keys and values."""
        m, ids = len(public), jnp.asarray(public)

        def run(*leaves: jax.Array) -> Block:
            weights = jax.tree.unflatten(self._tree, leaves)
            x = self._family.embed(weights, self._config, ids, jnp.arange(m))
            rows, cache = rows_after(0, m, m), self._config.empty_cache(m)
            return self._family.forward(weights, self._config, x, rows, cache)[1]

        return jax.jit(run)(*self._leaves)

    def _compile(self, n: int) -> Callable[..., Any]:
        config, m, layers = self._config, self._public, self._config.layers

        def run(tokens: jax.Array, *others: jax.Array) -> list[jax.Array]:
            cache = config.empty_cache(n)
            if m:
                keys, values = others[:layers], others[layers : 2 * layers]
                cache, others = lengthened(Block(keys, values), m + n), others[2 * layers :]
            weights = jax.tree.unflatten(self._tree, others)
            one_hot = jax.nn.one_hot(tokens, config.vocab_size, dtype=np.float32)
            x = self._family.embed(weights, config, one_hot, m + jnp.arange(n))
            rows = rows_after(m, n, m + n)
            normed, _, outside = self._family.forward(weights, config, x, rows, cache)
            self._sites = list(outside)
            return [self._family.head(weights, normed), jnp.stack(list(outside.values()))]

        if not self._pieces:
            return jax.jit(run)
        return compiled_in_pieces(run, n, [*self._cached(), *self._leaves])
