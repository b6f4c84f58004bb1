"""The models that a provider serves: loaded, checked and held in memory before its port opens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from models.family import ModelConfig
from models.files import TOKENIZER_FILE
from models.hf import load_model
from models.resident import digest
from models.text_format import TextFormat
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.net.manifest import Manifest
from spu_llm.offline.silent.store import default_directory, version_folder
from spu_llm.service import agreeing
from spu_llm.systems.program import SystemPromptShape
from spu_llm.systems.served import ServedSystem


class Options(Protocol):
    """The options of a provider that concern its models (`provider.ServeOptions`)."""

    @property
    def models(self) -> Mapping[str, Path]: ...
    @property
    def ranges(self) -> Path | None: ...
    @property
    def network(self) -> str: ...
    @property
    def jobs(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def studies(self) -> bool: ...
    @property
    def system(self) -> ServedSystem: ...
    @property
    def system_prompt(self) -> str: ...
    @property
    def prefix_pad(self) -> int: ...


@dataclass(frozen=True)
class ServedModel:
    """A model as sessions get it. `weights`: the descriptor of its folded weights; `hints`: where
    the hints of these weights are kept; `stated`: what the provider states of it and of itself;
    `text`: how its text is written, None without a tokenizer; `own_text`: the tokens before every
    prompt.
    """

    name: str
    directory: Path
    weights: int
    hints: Path
    stated: Manifest
    text: TextFormat | None = None
    own_text: Sequence[int] = ()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.text is None else self.text.tokenizer


class ServedModels:
    """All models of a provider, the first of which is served to a client that names none."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.all, self.first = models, models[0]
        self._by_name = {model.name: model for model in models}

    @property
    def names(self) -> list[str]:
        """Return the names that a client may ask for; none where the only model has no name."""
        return [name for name in self._by_name if name]

    def find(self, name: str) -> ServedModel:
        """Return the model of this name; InputError, which the client hears, if there is none."""
        if not name:
            return self.first
        try:
            return self._by_name[name]
        except KeyError:
            raise InputError(self._unknown(name)) from None

    def _unknown(self, name: str) -> str:
        if not self.names:
            return "the provider serves one model, which has no name; leave --served-model out"
        return f"the provider serves no model {name[:64]!a}; it serves {', '.join(self.names)}"


@contextmanager
def loaded(options: Options) -> Iterator[ServedModels]:
    """Yield the models that the options name, whose weights are held until the block ends.
    InputError for a model that cannot be served so.
    """
    root = default_directory("provider")
    with ExitStack() as held:
        yield ServedModels(
            [
                _served(name, directory, options, root, held)
                for name, directory in options.models.items()
            ]
        )


def _served(
    name: str, directory: Path, options: Options, root: Path, held: ExitStack
) -> ServedModel:
    """Return a model, ready for sessions. `root`: where the provider keeps all its hints; `held`
    closes the descriptor of its weights.
    """
    config, params = load_model(directory, options.ranges, encoders=True)
    if config.encodes and type(options.system) is not ServedSystem:
        raise InputError(
            f"{directory} is a {config.title} model, which is served for completions alone; "
            "leave --split, --mark and --references out"
        )
    weights = options.system.place(params, config)
    held.callback(os.close, weights)
    del params  # all workers use the weights in one place
    hints = version_folder(root, f"{config.asdict()} {digest(weights)}")
    text = _text_format(directory, options)
    tokenizer = None if text is None else text.tokenizer
    before, own_text = _own_text(directory, options, tokenizer, config)
    stated = agreeing.of_provider(
        config,
        tokenizer,
        options.network,
        options.jobs,
        before,
        None if text is None else text.digest,
        backend=options.backend,
    )
    return ServedModel(name, directory, weights, hints, stated, text, own_text)


def _text_format(directory: Path, options: Options) -> TextFormat | None:
    """Return how the model's text is written, if it has a tokenizer; only studies do without."""
    if options.studies and not (directory / TOKENIZER_FILE).exists():
        return None
    return TextFormat.of_model(directory)


def _own_text(
    directory: Path, options: Options, tokenizer: Tokenizer | None, config: ModelConfig
) -> tuple[SystemPromptShape, list[int]]:
    """Return the rows of the text before every prompt, as clients hear of them, and its tokens.
    InputError when nothing fits after it.
    """
    if not options.system_prompt:
        return SystemPromptShape(), []
    if config.encodes:
        raise InputError(
            f"a {config.title} model reads all of a prompt at once, so no text of yours comes "
            "before it; leave --system-prompt out"
        )
    if options.studies:
        raise InputError("studies run the model alone; leave --studies or --system-prompt out")
    if tokenizer is None:
        raise InputError(f"{directory} has no tokenizer for --system-prompt")
    # It goes on after what every text begins with, which is public.
    tokens, pad = tokenizer.encode(options.system_prompt, goes_on=True), options.prefix_pad
    if not tokens:
        raise InputError("the system prompt has no tokens")
    rows = -(-len(tokens) // pad) * pad
    if rows > config.context - 2:  # a prompt and a token of text
        raise InputError(
            f"the system prompt has {len(tokens)} tokens and takes {rows} positions, but the "
            f"model's context is {config.context}; shorten it, or give a smaller --prefix-pad"
        )
    return SystemPromptShape(rows, pad - 1), tokens
