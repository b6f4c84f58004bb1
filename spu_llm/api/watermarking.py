"""Texts that are written here or elsewhere and marked by a user's keys (Bahri et al.)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from models.hf import load_folded
from models.stops import Stops
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling
from spu_llm.api.defaults import shipped
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.beams import BeamSampler
from spu_llm.systems.watermark.embedding import Embedder, Made
from spu_llm.systems.watermark.endpoint import HttpSampler
from spu_llm.systems.watermark.history import History, HistoryFile, history_path
from spu_llm.systems.watermark.keys import RIVALS, Key, Scheme, read_keys
from spu_llm.systems.watermark.model_sampler import ModelSampler
from spu_llm.systems.watermark.race_marks import MarkedNoise, marked_text, race_text
from spu_llm.systems.watermark.rewriting import Rewriter
from spu_llm.systems.watermark.rivals import check_delta, next_token
from spu_llm.systems.watermark.sampler import CommandSampler, Sampler
from spu_llm.systems.watermark.units import units_of

OnWords = Callable[[str], None]
CANDIDATES_BY = ("sample", "beam", "paraphrase")


@dataclass(frozen=True)
class EmbedOptions:
    """Options of a marked text. Of `model`, `program` and `endpoint` one is given; without any the
    shipped private model writes.
    """

    model: Path | None = None  # directory of a model that runs here
    program: str | None = None  # a command that reads and writes JSON lines
    endpoint: str | None = None  # URL of a completion endpoint
    endpoint_model: str = ""
    max_new_tokens: int = 128
    candidates: int = 16  # for a chunk and key; 0: every token, of a model run here
    chunk: int = 1  # tokens of a candidate
    candidates_by: str = "sample"  # or, of a model run here, "beam" or "paraphrase"
    paraphraser: Path | None = None  # the model that rewrites; the shipped public one by default
    spread: bool = False  # candidates of a model run here share their draws
    delta: float | None = None  # of a key of Kirchenbauer's scheme; the paper's by default
    temperature: float = 1.0  # of a model run here or an endpoint
    stop: Sequence[str] = ()
    no_history: bool = False  # an n-gram marks whenever it comes, as published
    tokenizer: Path | None = None  # of a key whose units are tokens; that of the model by default

    def check(self, prompt: str) -> None:
        """Raise InputError for what nothing could write."""
        if self.max_new_tokens < 1:
            raise InputError(f"--max-new-tokens must be 1 or more, found {self.max_new_tokens}")
        if self.candidates < 0:
            raise InputError(f"--candidates must be 0 (all) or more, found {self.candidates}")
        if not prompt:
            raise InputError("the prompt is empty; give at least one character of text")
        self._check_candidates()

    def _check_candidates(self) -> None:
        by = self.candidates_by
        if by not in CANDIDATES_BY:
            raise InputError(f"--candidates-by must be {', '.join(CANDIDATES_BY)}, found {by!r}")
        if self.paraphraser is not None and by != "paraphrase":
            raise InputError("--paraphraser is for --candidates-by paraphrase; leave it out")
        if by == "sample":
            return
        if self.program is not None or self.endpoint is not None:
            raise InputError(
                f"--candidates-by {by} is for a model run here; give --model, or leave --command "
                "and --endpoint out"
            )
        if self.spread or not self.candidates:
            raise InputError(
                f"--candidates-by {by} draws no samples to spread, and has 1 candidate or more; "
                "leave --spread and --candidates 0 out"
            )


@dataclass(frozen=True)
class ChunkMark:
    """Choice of a chunk: the distinct candidates, and the n-grams that seeded each key's draw."""

    distinct: int
    seeds: list[Any]


@dataclass(frozen=True)
class MarkedText:
    """A marked text. Its fields in JSON (`to_json`) are the command line's `--json`."""

    text: str
    finish_reason: str  # "" while it is being written
    tokens: list[int] | None = None  # of a model run here
    chunks: list[ChunkMark] | None = None  # of a key that marks by candidates
    candidates_by: str | None = None  # of a key that marks by candidates
    # Whether this text alone has the distribution that it has without a mark, as above: by samples,
    # and with a history, since an n-gram that comes again would decide again. None: of an
    # endpoint or a program, whose candidates may lose halves of characters.
    distortion_free: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; those that there are not are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class Embedding:
    """A text to write and to mark. `so_far` has what was written when `run` is cut off."""

    prompt: str
    key_files: Sequence[Path]  # several mark one inside the other
    options: EmbedOptions = EmbedOptions()
    so_far: Callable[[], MarkedText] = field(default=lambda: MarkedText("", ""), init=False)

    def run(self, on_progress: OnWords = lambda words: None) -> MarkedText:
        """Write the text. What was used of the keys is in the history beside each key. on_progress:
        hears how far it is. InputError for what cannot be written or marked; PeerError where what
        writes fails.
        """
        options = self.options
        options.check(self.prompt)
        keys, scheme = read_keys(self.key_files)
        if scheme.method == "provider":
            raise InputError(
                "a provider's key marks what serve --mark gives; embed takes another one"
            )
        delta = check_delta(options.delta, scheme)
        no_history = options.no_history or scheme.method in RIVALS
        with ExitStack() as kept:
            histories = tuple(
                History(False)
                if no_history
                else kept.enter_context(HistoryFile(history_path(path), key))
                for path, key in zip(self.key_files, keys, strict=True)
            )
            if options.program is None and options.endpoint is None:
                return self._by_model(keys, scheme, histories, delta, on_progress)
            return self._from_outside(keys, scheme, histories, on_progress)

    def _by_model(
        self,
        keys: tuple[Key, ...],
        scheme: Scheme,
        histories: tuple[History, ...],
        delta: float,
        on_progress: OnWords,
    ) -> MarkedText:
        options = self.options
        directory = options.model or shipped("private")
        if not 0.05 <= options.temperature <= 5:
            raise InputError(f"--temperature must be 0.05 to 5, found {options.temperature}")
        tokenizer = Tokenizer.load(directory)
        check_tokenizer(scheme, tokenizer, directory)
        config, weights = load_folded(directory)
        prompt = tuple(tokenizer.encode(self.prompt))
        room = config.context - len(prompt)
        if room < 1:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, but the model's context is "
                f"{config.context}; shorten it to {config.context - 1} or fewer"
            )
        count = min(options.max_new_tokens, room)
        sampling = Sampling(options.temperature)
        sampler = ModelSampler(config, weights, tokenizer.eos_ids, sampling, spread=options.spread)
        if scheme.method == "candidates":
            made = Made(())
            self.so_far = lambda: _marked(made, options, tokenizer)
            source: Sampler = sampler
            if options.candidates_by == "beam":
                source = BeamSampler(config, weights, tokenizer.eos_ids, sampling)
            elif options.candidates_by == "paraphrase":
                source = Rewriter(sampler, self._paraphraser(tokenizer, sampling))
            decode: Callable[[Any], str] = tokenizer.decode  # of tokens, which a model writes
            self._embedder(keys, scheme, source, tokenizer, histories).text(
                prompt,
                count,
                Stops.of(options.stop, tokenizer),
                decode,
                lambda content: on_progress(f"{len(content)} tokens"),
                made,
            )
            return self.so_far()
        if options.candidates_by != "sample":
            raise InputError(
                f"a key of the method {scheme.method} has no candidates; leave --candidates-by out"
            )
        if len(keys) > 1 or options.stop:
            raise InputError(f"a key of the method {scheme.method} marks alone, and without --stop")
        on_progress("writing")
        if scheme.method in RIVALS:
            token = next_token(keys[0], scheme, config.vocab_size, delta, Prg.from_os())
            tokens, ended = marked_text(
                sampler.distribution, token, prompt, count, tokenizer.eos_ids
            )
        else:
            noise = MarkedNoise(keys[0], scheme.ngram, config.vocab_size, histories[0])
            tokens, ended = race_text(sampler.distribution, noise, prompt, count, tokenizer.eos_ids)
            noise.finish(tokens)
        return MarkedText(tokenizer.decode(tokens), "eos" if ended else "length", list(tokens))

    def _paraphraser(self, tokenizer: Tokenizer, sampling: Sampling) -> ModelSampler:
        """Return the model that rewrites samples; InputError where it has other tokens."""
        directory = self.options.paraphraser or shipped("public")
        if Tokenizer.load(directory).digest != tokenizer.digest:
            raise InputError(
                f"{directory} has another tokenizer than the model; give --paraphraser, a model "
                "with the same"
            )
        config, weights = load_folded(directory)
        return ModelSampler(config, weights, tokenizer.eos_ids, sampling)

    def _from_outside(
        self,
        keys: tuple[Key, ...],
        scheme: Scheme,
        histories: tuple[History, ...],
        on_progress: OnWords,
    ) -> MarkedText:
        if scheme.method != "candidates":
            raise InputError(
                f"a key of the method {scheme.method} marks what a model run here writes; give "
                "--model, or leave --command and --endpoint out"
            )
        tokenizer = tokenizer_of(scheme, self.options.tokenizer)
        made = Made("")
        self.so_far = lambda: _marked(made, self.options)
        with _outside(self.options, on_progress) as sampler:
            self._embedder(keys, scheme, sampler, tokenizer, histories).text(
                self.prompt,
                self.options.max_new_tokens,
                Stops.of(self.options.stop, None),
                None,
                lambda content: on_progress(f"{len(content)} characters"),
                made,
            )
        return self.so_far()

    def _embedder(
        self,
        keys: tuple[Key, ...],
        scheme: Scheme,
        sampler: Sampler,
        tokenizer: Tokenizer | None,
        histories: tuple[History, ...],
    ) -> Embedder:
        units = units_of(scheme.units, tokenizer)
        most, chunk = self.options.candidates or None, self.options.chunk
        return Embedder(keys, scheme, sampler, units, most, chunk, histories)


@contextmanager
def _outside(options: EmbedOptions, on_wait: OnWords) -> Iterator[Sampler]:
    """Yield what an endpoint or a command writes; it is closed in the end."""
    if options.endpoint is not None:
        endpoint = HttpSampler(
            options.endpoint, options.endpoint_model, options.temperature, on_wait=on_wait
        )
        try:
            yield endpoint
        finally:
            endpoint.close()
        return
    assert options.program is not None
    try:
        arguments = shlex.split(options.program)
    except ValueError as exc:
        raise InputError(f"--command cannot be read ({exc}): {options.program!r}") from None
    if not arguments:
        raise InputError("--command is empty; give a program and its arguments")
    sampler = CommandSampler(arguments)
    try:
        yield sampler
    finally:
        sampler.close()


def _marked(made: Made, options: EmbedOptions, tokenizer: Tokenizer | None = None) -> MarkedText:
    """Return what was made so far; `tokenizer`: of tokens, where it is no text yet."""
    chunks = [ChunkMark(chunk.distinct, list(chunk.seeds)) for chunk in made.chunks]
    by = options.candidates_by
    exact = by == "sample" and not options.no_history
    if isinstance(made.content, str):
        # A sampler of text loses halves of characters (`sampler.whole`): that it is exact, nobody
        # here can say.
        return MarkedText(made.content, made.reason, None, chunks, by, None if exact else False)
    assert tokenizer is not None
    tokens = list(made.content)
    return MarkedText(tokenizer.decode(tokens), made.reason, tokens, chunks, by, exact)


def tokenizer_of(scheme: Scheme, directory: Path | None) -> Tokenizer | None:
    """Return the tokenizer of a key whose units are tokens, from `directory` or the shipped private
    model; None for words. InputError for another one than the key's.
    """
    if scheme.units != "tokens":
        return None
    where = directory or shipped("private")
    tokenizer = Tokenizer.load(where)
    check_tokenizer(scheme, tokenizer, where)
    return tokenizer


def check_tokenizer(scheme: Scheme, tokenizer: Tokenizer, directory: Path) -> None:
    """Raise InputError for a key of other tokens than this tokenizer's."""
    if scheme.units == "tokens" and not tokenizer.is_named(scheme.tokenizer):
        raise InputError(
            f"the key marks tokens of another tokenizer than that in {directory}; give --tokenizer"
        )
