"""`spu-llm watermark`: text that its key finds again."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.api.defaults import PROMPT
from spu_llm.app.options import add_prompt, add_stop, given
from spu_llm.app.output import check_output, write_json, write_page
from spu_llm.app.printing import Generated, say, show, show_table
from spu_llm.core.errors import InputError, PeerError
from spu_llm.core.text_files import decoded, read_text

if TYPE_CHECKING:
    from spu_llm.api.watermarking import MarkedText
    from spu_llm.systems.watermark.keys import KeyFile

NGRAM, CANDIDATES, CHUNK, NEW_TOKENS = 4, 16, 1, 128
_MOST_TOKENS = 1_000_000
_ABOUT = (
    "A watermark for anything that samples text (Bahri et al., A Watermark for Black-Box Language "
    "Models): of several candidates for the next few tokens a secret key chooses one, and the text "
    "has the distribution that it has without. Whoever has the key finds the mark in the text "
    "alone."
)


def add_command(commands: Any) -> None:
    mark = commands.add_parser(
        "watermark", help="mark generated text, and find marks", description=_ABOUT
    )
    parts = mark.add_subparsers(dest="part", required=True, parser_class=type(mark))
    _add_keygen(parts)
    _add_embed(parts)
    _add_detect(parts)
    _add_power(parts)


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
        help="distribution of the numbers: uniform, normal, chi2, gamma (default: %(default)s)",
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
        "alike: a stronger mark with --chunk 1, the same distribution of texts",
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
    _add_provider_options(detect)
    _tokenizer_option(detect)
    detect.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    detect.add_argument("--html", type=Path, metavar="FILE", help="write the text, highlighted")
    _debug(detect)
    detect.set_defaults(run=_detect)


def _add_power(parts: Any) -> None:
    power = parts.add_parser(
        "power",
        help="how much text a mark takes to be found, by the paper's theorems",
        description="What is proved of texts in which no n-gram comes twice and no two candidates "
        "are alike: AUC by Theorem 4.2 (uniform numbers, one token a candidate), true positives of "
        "the likelihood ratio by Theorem 4.4 (gamma numbers), AUC of the sum of normal numbers. "
        "Text that repeats itself, or has few continuations, stays below.",
    )
    power.add_argument(
        "--tokens",
        type=int,
        action="append",
        metavar="T",
        help="of the text; may be given again, for a row each (default: 50, 100, 200, 400)",
    )
    power.add_argument(
        "--candidates", type=int, default=CANDIDATES, metavar="M", help="default: %(default)s"
    )
    power.add_argument(
        "--chunk",
        type=int,
        default=CHUNK,
        metavar="K",
        help="tokens of a candidate (default: %(default)s)",
    )
    power.add_argument(
        "--alpha",
        type=float,
        default=0.01,
        metavar="A",
        help="false positives of the likelihood ratio (default: %(default)s)",
    )
    power.add_argument(
        "--entropy",
        type=float,
        metavar="H",
        help="of the candidates at a place, in the mean, in nats: Theorem 4.2's alpha (default: "
        "log M, as if no two were ever alike)",
    )
    power.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    _debug(power)
    power.set_defaults(run=_power)


def _add_provider_options(detect: argparse.ArgumentParser) -> None:
    """Add the options that `detect` takes for a provider's key."""
    detect.add_argument(
        "--session",
        metavar="NONCE",
        help="of a provider's key: only the session with this nonce, known "
        "from elsewhere: p is too small for one that an earlier detect has named",
    )
    detect.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR",
        help="of a provider's key: the public model that clients draft with; what "
        "it would have drafted says how the text was made: finds marks in "
        "shorter texts, and about where they are; texts of a client that drafted "
        "otherwise are found as without it",
    )
    detect.add_argument(
        "--references",
        type=int,
        default=0,
        metavar="N",
        help="of a provider's key: also compare with N sessions that never were: "
        "a p by their rank times the sessions that there are (Bonferroni), so down "
        "to sessions / (N + 1)",
    )


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
    """Print the text, or what was written until then; progress to stderr, the rest to `--json`."""
    from spu_llm.api.watermarking import Embedding, EmbedOptions
    from spu_llm.app.progress import Progress

    check_output(options.json)
    embedding = Embedding(options.prompt, options.key, given(EmbedOptions, options))
    how = "give the prompt with this text after it, and the same keys, to go on"
    progress = Progress()
    try:
        progress.stage("starting")
        marked = embedding.run(progress.update)
    except (PeerError, KeyboardInterrupt) as exc:
        written = embedding.so_far()
        if not written.text:
            raise
        progress.pause()
        _give(options, written)
        if isinstance(exc, PeerError):
            raise PeerError(f"{exc}; what was written until then is kept: {how}") from exc
        say(f"what was written is kept: {how}")
        raise
    finally:
        progress.close()
    _give(options, marked)


def _give(options: argparse.Namespace, marked: MarkedText) -> None:
    """Print the text, and write all of it to `--json`."""
    generated = Generated()
    generated.write(marked.text)
    generated.end_line()
    write_json(options.json, marked.to_json())


def _detect(options: argparse.Namespace) -> None:
    """Detect a mark: the verdict to stdout, all of it to `--json`, the marked text to `--html`."""
    from spu_llm.api.watermarking import tokenizer_of
    from spu_llm.systems.watermark.detecting import as_json, as_p, detect
    from spu_llm.systems.watermark.keys import read_key
    from spu_llm.systems.watermark.page import page
    from spu_llm.systems.watermark.units import units_of

    check_output(options.json)
    check_output(options.html, "--html")
    files = [read_key(path) for path in options.key]
    text = _text(options.text)
    if any(file.scheme.method == "provider" for file in files):
        if len(files) > 1:
            raise InputError("a provider's key finds its texts alone; give no other one")
        _detect_provider(options, files[0], text)
        return
    _check_unused(options)
    units = [
        units_of(file.scheme.units, tokenizer_of(file.scheme, options.tokenizer)) for file in files
    ]
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


def _detect_provider(options: argparse.Namespace, file: KeyFile, text: str) -> None:
    """Detect a provider's marks: the verdict to stdout, all of it to `--json`, the text with its
    marks to `--html`.
    """
    from spu_llm.api.watermarking import tokenizer_of
    from spu_llm.app.progress import Progress
    from spu_llm.systems.watermark.provider_detecting import detect_provider

    if options.score is not None or options.join:
        raise InputError("--score and --join are not for a provider's key; leave them out")
    (path,) = options.key
    tokenizer = tokenizer_of(file.scheme, options.tokenizer)
    assert tokenizer is not None
    progress = Progress()
    try:
        progress.stage("comparing")
        verdict = detect_provider(
            path,
            file,
            tokenizer,
            text,
            alpha=options.alpha,
            session=options.session,
            draft_model=options.draft_model,
            references=options.references,
            on_progress=progress.update,
        )
    finally:
        progress.close()
    show_table(verdict.summary())
    write_json(options.json, verdict.to_json())
    if options.html is not None:
        write_page(options.html, verdict.page(text))


def _check_unused(options: argparse.Namespace) -> None:
    """Raise InputError for options that another key than a provider's has no use for."""
    unused = options.session, options.draft_model
    if options.references or any(option is not None for option in unused):
        raise InputError(
            "--session, --draft-model and --references are for a provider's key; leave them out"
        )


def _power(options: argparse.Namespace) -> None:
    """Print what the theorems say, a row for each length; write it to `--json`."""
    from spu_llm.systems.watermark.theory import power

    tokens, m, k = options.tokens or [50, 100, 200, 400], options.candidates, options.chunk
    if not all(1 <= one <= _MOST_TOKENS for one in tokens):
        raise InputError(f"--tokens must be 1 to {_MOST_TOKENS}")
    if not 2 <= m <= _MOST_TOKENS:
        raise InputError(f"--candidates must be 2 to {_MOST_TOKENS}, found {m}; one marks nothing")
    if not 1 <= k <= min(tokens):
        raise InputError(f"--chunk must be 1 to the fewest --tokens, {min(tokens)}, found {k}")
    if not 0 < options.alpha < 1:
        raise InputError(f"--alpha must be between 0 and 1, found {options.alpha:g}")
    if options.entropy is not None and not 0 < options.entropy <= math.log(m):
        raise InputError(
            f"--entropy must be above 0 and log {m} = {math.log(m):.4g} at most, "
            f"found {options.entropy:g}"
        )
    check_output(options.json)
    rows = [power(one, k, m, options.alpha, options.entropy) for one in tokens]
    show("tokens  AUC at least  true positives  AUC, normal numbers")
    for row in rows:
        least = "–" if row.auc_at_least is None else f"{row.auc_at_least:.4f}"
        share = f"{100 * row.true_positives:.2f} %"
        show(f"{row.tokens:6d}  {least:>12}  {share:>14}  {row.normal_auc:19.4f}")
    show(f"{m} candidates of {k} tokens; true positives at {100 * options.alpha:g} % false ones")
    write_json(
        options.json,
        {
            "candidates": m,
            "chunk": k,
            "alpha": options.alpha,
            "entropy": options.entropy,
            "rows": [asdict(row) for row in rows],
        },
    )


def _text(path: Path) -> str:
    """Return the text in a file, or from standard input for "-"; InputError if there is none."""
    standard = str(path) == "-"
    text = decoded(sys.stdin.buffer.read(), "standard input") if standard else read_text(path)
    if not text.strip():
        raise InputError(f"{path} is empty; there is nothing to find a mark in")
    return text
