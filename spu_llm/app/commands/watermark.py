"""`spu-llm watermark`: text that its key finds again."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from spu_llm.api.defaults import PROMPT, shipped
from spu_llm.app import provider_marks
from spu_llm.app.options import add_prompt, add_stop
from spu_llm.app.output import check_output, write_json, write_page
from spu_llm.app.printing import Generated, say, show
from spu_llm.core.errors import InputError, PeerError
from spu_llm.core.text_files import decoded, read_text

NGRAM, CANDIDATES, CHUNK, NEW_TOKENS = 4, 16, 1, 128
_ABOUT = (
    "A watermark for anything that samples text (Bahri et al., A Watermark for Black-Box Language "
    "Models): of several candidates for the next few tokens a secret key chooses one, and the text "
    "has the law that it has without. Whoever has the key finds the mark in the text alone."
)


def add_command(commands: Any) -> None:
    mark = commands.add_parser(
        "watermark", help="mark generated text, and find marks", description=_ABOUT
    )
    parts = mark.add_subparsers(dest="part", required=True, parser_class=type(mark))
    _add_keygen(parts)
    _add_embed(parts)
    _add_detect(parts)


def _add_keygen(parts: Any) -> None:
    keygen = parts.add_parser(
        "keygen",
        help="make a key",
        description="Makes FILE, readable by you alone: a key, and what it marks by. Who has it "
        "can find the mark, and can put it on any text.",
    )
    keygen.add_argument("--out", type=Path, required=True, metavar="FILE")
    keygen.add_argument(
        "--ngram",
        type=int,
        default=NGRAM,
        metavar="N",
        help="units of text that a mark hangs on: fewer outlast more changes, and "
        "come again sooner (default: %(default)s)",
    )
    keygen.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="units are this model's tokens (default: words, whatever writes them)",
    )
    keygen.add_argument(
        "--race",
        action="store_true",
        help="no candidates: the noise of a race, of a model whose distribution is "
        "known; needs --tokenizer",
    )
    keygen.add_argument(
        "--provider",
        action="store_true",
        help="for serve --mark: the noise of a session's places, whatever its "
        "client does; needs --tokenizer, the model's",
    )
    keygen.add_argument(
        "--family",
        default="uniform",
        metavar="F",
        help="law of the numbers: uniform, normal, chi2, gamma (default: %(default)s)",
    )
    keygen.add_argument(
        "--gamma-k", type=int, default=1, metavar="K", help="of gamma: the length of chunks"
    )
    _debug(keygen)
    keygen.set_defaults(run=_keygen)


def _add_embed(parts: Any) -> None:
    embed = parts.add_parser(
        "embed", help="write marked text", description=_ABOUT + " The text goes to stdout."
    )
    _key_option(embed, "several keys mark one inside the other, with M^t candidates")
    source = embed.add_mutually_exclusive_group()
    source.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="model directory, run here (default: the shipped private one)",
    )
    source.add_argument(
        "--command",
        dest="program",
        metavar="CMD",
        help='reads lines {"prefix", "n", "max_tokens"}, writes lines '
        '{"sequences": [{"text", "ended"}, ...]}',
    )
    source.add_argument(
        "--endpoint",
        metavar="URL",
        help="a completion endpoint, .../v1/completions; SPU_LLM_API_KEY may hold its key",
    )
    embed.add_argument("--endpoint-model", default="", metavar="NAME")
    add_prompt(embed, PROMPT)
    embed.add_argument(
        "--max-new-tokens", type=int, default=NEW_TOKENS, metavar="N", help="default: %(default)s"
    )
    embed.add_argument(
        "--candidates",
        type=int,
        default=CANDIDATES,
        metavar="M",
        help="for a chunk and key; 0: every token, of a model run here (default: %(default)s)",
    )
    embed.add_argument(
        "--chunk",
        type=int,
        default=CHUNK,
        metavar="K",
        help="tokens of a candidate (default: %(default)s)",
    )
    embed.add_argument(
        "--spread",
        action="store_true",
        help="candidates of a model run here share their draws, so that fewer are "
        "alike: a stronger mark with --chunk 1, the same law of texts",
    )
    embed.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="of a model run here or an endpoint (default: %(default)s)",
    )
    add_stop(embed)
    embed.add_argument(
        "--no-history",
        action="store_true",
        help="an n-gram marks whenever it comes, as published; without this, "
        "KEYFILE.history keeps which ones were used, and they mark no further text, "
        "so that all texts together look unmarked",
    )
    _tokenizer_option(embed)
    embed.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    _debug(embed)
    embed.set_defaults(run=_embed)


def _add_detect(parts: Any) -> None:
    detect = parts.add_parser(
        "detect",
        help="is a text marked, and where",
        description="p is how often an unmarked text looks as much like a marked one, whatever its "
        "length. Of a text that holds little of the marked one, the parts tell more than p.",
    )
    detect.add_argument("text", type=Path, metavar="TEXT", help="a file; -: standard input")
    _key_option(detect, "several are tested, and joined")
    detect.add_argument(
        "--score",
        metavar="S",
        help="sum, fisher, lrt, the likelihood ratio for --candidates and "
        "--chunk, or lrt-published (default: sum; fisher for a key of --race)",
    )
    detect.add_argument(
        "--candidates", type=int, default=CANDIDATES, metavar="M", help="default: %(default)s"
    )
    detect.add_argument(
        "--chunk", type=int, default=CHUNK, metavar="K", help="default: %(default)s"
    )
    detect.add_argument(
        "--join",
        type=float,
        action="append",
        default=[],
        metavar="P",
        help="p of this text by a key that somebody else holds; may be given again",
    )
    detect.add_argument(
        "--alpha",
        type=float,
        default=1e-3,
        metavar="A",
        help="call marked what has p of this or less (default: %(default)s)",
    )
    provider_marks.add_options(detect)
    _tokenizer_option(detect)
    detect.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    detect.add_argument("--html", type=Path, metavar="FILE", help="write the text, highlighted")
    _debug(detect)
    detect.set_defaults(run=_detect)


def _key_option(parser: Any, several: str) -> None:
    parser.add_argument(
        "--key",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help=f"as keygen makes it; may be given again: {several}",
    )


def _tokenizer_option(parser: Any) -> None:
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="of a key whose units are tokens (default: that of the model)",
    )


def _debug(parser: Any) -> None:
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


def _keygen(options: argparse.Namespace) -> None:
    from models.tokenizer import Tokenizer
    from spu_llm.systems.watermark.cdfs import Family
    from spu_llm.systems.watermark.keys import Key, Scheme, write_key

    digest = Tokenizer.load(options.tokenizer).digest if options.tokenizer else ""
    units = "tokens" if options.tokenizer else "words"
    if options.race and options.provider:
        raise InputError("--race is a client's key, --provider a provider's; give one of them")
    method = "race" if options.race else "provider" if options.provider else "candidates"
    family = Family(options.family, options.gamma_k)
    scheme = Scheme(options.ngram, family, units, method, digest)
    write_key(options.out, Key.from_os(), scheme)
    what = "all texts of a provider" if options.provider else f"n-grams of {scheme.ngram} {units}"
    show(f"{options.out}: a key for {what}; keep it")


def _embed(options: argparse.Namespace) -> None:
    from spu_llm.systems.watermark.history import History, HistoryFile, history_path
    from spu_llm.systems.watermark.keys import read_keys

    check_output(options.json)
    if options.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be 1 or more, found {options.max_new_tokens}")
    if options.candidates < 0:
        raise InputError(f"--candidates must be 0 (all) or more, found {options.candidates}")
    if not options.prompt:
        raise InputError("the prompt is empty; give at least one character of text")
    keys, scheme = read_keys(options.key)
    if scheme.method == "provider":
        raise InputError("a provider's key marks what serve --mark gives; embed takes another one")
    with ExitStack() as kept:
        histories = tuple(
            History(False)
            if options.no_history
            else kept.enter_context(HistoryFile(history_path(path), key))
            for path, key in zip(options.key, keys, strict=True)
        )
        result = _written(options, keys, scheme, histories)
    _give(options, result)


def _give(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print the text, and write all of it to `--json`."""
    generated = Generated()
    generated.write(result["text"])
    generated.end_line()
    write_json(options.json, result)


@contextmanager
def _giving_what_is_made(
    options: argparse.Namespace, progress: Any, result: Callable[[], dict[str, Any]]
) -> Iterator[None]:
    """Give the text so far when a sampler fails or the user interrupts it; say how to go on."""
    how = "give the prompt with this text after it, and the same keys, to go on"
    try:
        yield
    except (PeerError, KeyboardInterrupt) as exc:
        found = result()
        if not found["text"]:
            raise
        progress.pause()
        _give(options, found)
        if isinstance(exc, PeerError):
            raise PeerError(f"{exc}; what was written until then is kept: {how}") from exc
        say(f"what was written is kept: {how}")
        raise


def _written(options: argparse.Namespace, keys: Any, scheme: Any, histories: Any) -> dict[str, Any]:
    """Return a marked text, from wherever the options say."""
    from spu_llm.app.progress import Progress

    progress = Progress()
    try:
        progress.stage("starting")
        if options.program is None and options.endpoint is None:
            return _from_model(options, keys, scheme, histories, progress)
        return _from_outside(options, keys, scheme, histories, progress)
    finally:
        progress.close()


def _from_model(
    options: argparse.Namespace, keys: Any, scheme: Any, histories: Any, progress: Any
) -> dict[str, Any]:
    from models.hf import load_folded
    from models.stops import Stops
    from models.tokenizer import Tokenizer
    from protocols.verification.distribution import Sampling
    from spu_llm.systems.watermark.embedding import Made
    from spu_llm.systems.watermark.model_sampler import ModelSampler
    from spu_llm.systems.watermark.race_marks import MarkedNoise, race_text

    directory = options.model or shipped("private")
    if not 0.05 <= options.temperature <= 5:
        raise InputError(f"--temperature must be 0.05 to 5, found {options.temperature}")
    tokenizer = Tokenizer.load(directory)
    check_tokenizer(scheme, tokenizer, directory)
    config, weights = load_folded(directory)
    prompt = tuple(tokenizer.encode(options.prompt))
    room = config.context - len(prompt)
    if room < 1:
        raise InputError(
            f"the prompt has {len(prompt)} tokens, but the model's context is {config.context}; "
            f"shorten it to {config.context - 1} or fewer"
        )
    count = min(options.max_new_tokens, room)
    sampling = Sampling(options.temperature)
    sampler = ModelSampler(config, weights, tokenizer.eos_ids, sampling, spread=options.spread)
    if scheme.method == "candidates":
        made = Made(())

        def result() -> dict[str, Any]:
            assert isinstance(made.content, tuple)
            return _result(tokenizer.decode(made.content), made, list(made.content))

        with _giving_what_is_made(options, progress, result):
            _embedder(options, keys, scheme, sampler, tokenizer, histories).text(
                prompt,
                count,
                Stops.of(options.stop, tokenizer),
                tokenizer.decode,
                lambda content: progress.update(f"{len(content)} tokens"),
                made,
            )
        return result()
    if len(keys) > 1 or options.stop:
        raise InputError("a key of --race marks alone, and without --stop")
    noise = MarkedNoise(keys[0], scheme.ngram, config.vocab_size, histories[0])
    progress.update("writing")
    tokens, ended = race_text(sampler.distribution, noise, prompt, count, tokenizer.eos_ids)
    noise.finish(tokens)
    reason = "eos" if ended else "length"
    return {"text": tokenizer.decode(tokens), "finish_reason": reason, "tokens": list(tokens)}


def _from_outside(
    options: argparse.Namespace, keys: Any, scheme: Any, histories: Any, progress: Any
) -> dict[str, Any]:
    from models.stops import Stops
    from spu_llm.systems.watermark.embedding import Made

    if scheme.method != "candidates":
        raise InputError("a key of --race marks what a model run here writes; leave it out")
    tokenizer = _tokenizer(options, scheme)
    made = Made("")

    def result() -> dict[str, Any]:
        return _result(made.content, made, None)

    with _outside(options, progress) as sampler, _giving_what_is_made(options, progress, result):
        _embedder(options, keys, scheme, sampler, tokenizer, histories).text(
            options.prompt,
            options.max_new_tokens,
            Stops.of(options.stop, None),
            None,
            lambda content: progress.update(f"{len(content)} characters"),
            made,
        )
    return result()


@contextmanager
def _outside(options: argparse.Namespace, progress: Any) -> Iterator[Any]:
    from spu_llm.systems.watermark.endpoint import HttpSampler
    from spu_llm.systems.watermark.sampler import CommandSampler

    if options.endpoint is not None:
        endpoint = HttpSampler(
            options.endpoint, options.endpoint_model, options.temperature, on_wait=progress.update
        )
        try:
            yield endpoint
        finally:
            endpoint.close()
        return
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


def _embedder(
    options: argparse.Namespace,
    keys: Any,
    scheme: Any,
    sampler: Any,
    tokenizer: Any,
    histories: Any,
) -> Any:
    from spu_llm.systems.watermark.embedding import Embedder

    return Embedder(
        keys,
        scheme,
        sampler,
        _units(scheme, tokenizer),
        options.candidates or None,
        options.chunk,
        histories,
    )


def _result(text: Any, made: Any, tokens: list[int] | None) -> dict[str, Any]:
    return {
        "text": text,
        "finish_reason": made.reason,
        **({} if tokens is None else {"tokens": tokens}),
        "chunks": [{"distinct": c.distinct, "seeds": list(c.seeds)} for c in made.chunks],
    }


def _units(scheme: Any, tokenizer: Any) -> Any:
    from spu_llm.systems.watermark.units import units_of

    return units_of(scheme.units, tokenizer)


def _tokenizer(options: argparse.Namespace, scheme: Any) -> Any:
    """Return the tokenizer of a key whose units are tokens; None for words."""
    from models.tokenizer import Tokenizer

    if scheme.units != "tokens":
        return None
    directory = options.tokenizer or shipped("private")
    tokenizer = Tokenizer.load(directory)
    check_tokenizer(scheme, tokenizer, directory)
    return tokenizer


def check_tokenizer(scheme: Any, tokenizer: Any, directory: Path) -> None:
    if scheme.units == "tokens" and not tokenizer.is_named(scheme.tokenizer):
        raise InputError(
            f"the key marks tokens of another tokenizer than that in {directory}; give --tokenizer"
        )


def _detect(options: argparse.Namespace) -> None:
    """Detect a mark: the verdict to stdout, all of it to `--json`, the marked text to `--html`."""
    from spu_llm.systems.watermark.detecting import as_json, as_p, detect
    from spu_llm.systems.watermark.keys import read_key
    from spu_llm.systems.watermark.page import page

    check_output(options.json)
    check_output(options.html, "--html")
    files = [read_key(path) for path in options.key]
    text = _text(options.text)
    if any(file.scheme.method == "provider" for file in files):
        if len(files) > 1:
            raise InputError("a provider's key finds its texts alone; give no other one")
        provider_marks.detect(options, files[0], _tokenizer(options, files[0].scheme), text)
        return
    provider_marks.check_unused(options)
    units = [_units(file.scheme, _tokenizer(options, file.scheme)) for file in files]
    verdict = detect(
        files,
        units,
        text,
        score=options.score,
        m=options.candidates,
        k=options.chunk,
        told=options.join,
        alpha=options.alpha,
    )
    joined = len(files) + len(options.join)
    show(
        f"{'marked' if verdict.marked else 'no mark found'}: p = {as_p(verdict.log_p)}"
        + (f", of {joined} keys together" if joined > 1 else "")
    )
    for path, one in zip(options.key, verdict.keys, strict=True):
        if len(files) > 1:
            show(f"{path}: p = {as_p(one.log_p)}, {one.scored} n-grams")
        for span in one.spans:
            show(f"  characters {span.start} to {span.end}: p = {as_p(span.log_p_corrected)}")
    write_json(options.json, as_json(verdict))
    if options.html is not None:
        write_page(options.html, page(text, verdict))


def _text(path: Path) -> str:
    """Return the text in a file, or from standard input for "-"; InputError if there is none."""
    standard = str(path) == "-"
    text = decoded(sys.stdin.buffer.read(), "standard input") if standard else read_text(path)
    if not text.strip():
        raise InputError(f"{path} is empty; there is nothing to find a mark in")
    return text
