"""`spu-llm watermark`: text that its key finds again."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.app import mark_options
from spu_llm.app.options import given
from spu_llm.app.output import check_output, write_json, write_page
from spu_llm.app.printing import Generated, say, show, show_table
from spu_llm.core.errors import InputError, PeerError
from spu_llm.core.text_files import decoded, read_text

if TYPE_CHECKING:
    from spu_llm.api.watermarking import MarkedText
    from spu_llm.systems.watermark.keys import KeyFile

_MOST_TOKENS = 1_000_000
_MOST_VOCAB, _MOST_DRAWN = 1 << 18, 1 << 12  # of --next-token: some seconds


def add_command(commands: Any) -> None:
    mark = commands.add_parser(
        "watermark", help="mark generated text, and find marks", description=mark_options.ABOUT
    )
    parts = mark.add_subparsers(dest="part", required=True, parser_class=type(mark))
    mark_options.add_keygen(parts, _keygen)
    mark_options.add_embed(parts, _embed)
    mark_options.add_detect(parts, _detect)
    mark_options.add_power(parts, _power)


def _keygen(options: argparse.Namespace) -> None:
    from models.tokenizer import Tokenizer
    from spu_llm.systems.watermark.cdfs import Family
    from spu_llm.systems.watermark.keys import Key, Scheme, write_key

    if options.stems and options.tokenizer:
        raise InputError("units are stems or a model's tokens; give --stems or --tokenizer")
    digest = Tokenizer.load(options.tokenizer).digest if options.tokenizer else ""
    units = "tokens" if options.tokenizer else "stems" if options.stems else "words"
    method = options.scheme or "candidates"
    if options.race or options.provider:
        method = "race" if options.race else "provider"
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
    if any(file.scheme.method == "kuditipudi" for file in files):
        if len(files) > 1 or options.join or options.score is not None:
            raise InputError(
                "a key of Kuditipudi's is tested alone; leave other keys, --join and --score out"
            )
        _detect_aligned(options, files[0], text)
        return
    if options.references:
        raise InputError("--references are for a provider's or Kuditipudi's key; leave them out")
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


def _detect_aligned(options: argparse.Namespace, file: KeyFile, text: str) -> None:
    """Align a text with the list of a Kuditipudi key: the verdict to stdout, and to `--json`."""
    from spu_llm.api.watermarking import tokenizer_of
    from spu_llm.app.progress import Progress
    from spu_llm.core.prg import Prg
    from spu_llm.systems.watermark.detecting import as_p, tokens_of
    from spu_llm.systems.watermark.rivals import aligned_log_p
    from spu_llm.systems.watermark.units import units_of

    _check_unused(options)
    if options.html is not None:
        raise InputError("--html shows parts, and a key of Kuditipudi's finds none; leave it out")
    if not 0 < options.alpha < 1:
        raise InputError(f"--alpha must be between 0 and 1, found {options.alpha}")
    enough = math.ceil(1 / options.alpha) - 1
    references = options.references or enough
    if 1 / (references + 1) > options.alpha:
        raise InputError(
            f"--references {references} reach no p of --alpha or less; give {enough} or more"
        )
    units = units_of(file.scheme.units, tokenizer_of(file.scheme, options.tokenizer))
    tokens, progress = tokens_of(units.placed(text)), Progress()
    try:
        progress.stage("aligning")
        log_p = aligned_log_p(file.key, tokens, references, Prg.from_os(), progress.update)
    finally:
        progress.close()
    marked = log_p <= math.log(options.alpha)
    show(f"{'marked' if marked else 'no mark found'}: p = {as_p(log_p)}")
    verdict = {"marked": marked, "alpha": options.alpha, "p": as_p(log_p)}
    write_json(options.json, {**verdict, "tokens": len(tokens), "references": references})


def _check_unused(options: argparse.Namespace) -> None:
    """Raise InputError for options that another key than a provider's has no use for."""
    if options.session is not None or options.draft_model is not None:
        raise InputError("--session and --draft-model are for a provider's key; leave them out")


def _power(options: argparse.Namespace) -> None:
    """Print what the theorems say, a row for each length; write it to `--json`."""
    from spu_llm.systems.watermark.theory import alpha_of, next_token, power

    tokens, m, k = options.tokens or [50, 100, 200, 400], options.candidates, options.chunk
    if not all(1 <= one <= _MOST_TOKENS for one in tokens):
        raise InputError(f"--tokens must be 1 to {_MOST_TOKENS}")
    if not 2 <= m <= _MOST_TOKENS:
        raise InputError(f"--candidates must be 2 to {_MOST_TOKENS}, found {m}; one marks nothing")
    if not 1 <= k <= min(tokens):
        raise InputError(f"--chunk must be 1 to the fewest --tokens, {min(tokens)}, found {k}")
    if not 0 < options.alpha < 1:
        raise InputError(f"--alpha must be between 0 and 1, found {options.alpha:g}")
    if None not in (options.entropy, options.next_token):
        raise InputError("give --entropy or --next-token, not both")
    if options.next_token is not None and k > 1:
        raise InputError("--next-token is of candidates of one token; leave --chunk out")
    if not 2 <= options.vocab_size <= _MOST_VOCAB:
        raise InputError(f"--vocab-size must be 2 to {_MOST_VOCAB}, found {options.vocab_size}")
    if options.next_token is not None and m > _MOST_DRAWN:
        raise InputError(f"--candidates must be {_MOST_DRAWN} at most with --next-token, found {m}")
    if options.entropy is not None and not 0 < options.entropy <= math.log(m):
        raise InputError(
            f"--entropy must be above 0 and log {m} = {math.log(m):.4g} at most, "
            f"found {options.entropy:g}"
        )
    check_output(options.json)
    entropy = options.entropy
    if options.next_token is not None:
        entropy = alpha_of(next_token(options.next_token, options.vocab_size), m)
    rows = [power(one, k, m, options.alpha, entropy) for one in tokens]
    show("tokens  AUC at least  true positives  AUC, normal numbers")
    for row in rows:
        least = "–" if row.auc_at_least is None else f"{row.auc_at_least:.4f}"
        share = f"{100 * row.true_positives:.2f} %"
        show(f"{row.tokens:6d}  {least:>12}  {share:>14}  {row.normal_auc:19.4f}")
    show(f"{m} candidates of {k} tokens; true positives at {100 * options.alpha:g} % false ones")
    if options.next_token is not None:
        show(
            f"alpha {entropy:.4f} of {options.vocab_size} tokens, {options.next_token}; "
            f"log {m} = {math.log(m):.4f}"
        )
    write_json(
        options.json,
        {
            "candidates": m,
            "chunk": k,
            "alpha": options.alpha,
            "entropy": entropy,
            "next_token": options.next_token,
            "vocab_size": options.vocab_size if options.next_token else None,
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
