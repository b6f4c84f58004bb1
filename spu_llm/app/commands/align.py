"""`spu-llm align`: a draft model that learns what a private model answers."""

from __future__ import annotations

import argparse
import hashlib
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.app.printing import show
from spu_llm.app.progress import Progress
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from models.alignment.student import Student
    from models.alignment.writing import Script

LENGTH = 256
LANES = 64  # texts that the private model writes side by side
TOP_K = 5
MOST_BYTES = 2 << 30  # of the answers of a round
_REJECTION = 2.0  # weight of that loss beside the cross entropy


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "align",
        help="align a draft model with a private one, in the clear at its owner",
        description="The private model answers public text, chats, or what it asks itself, and a "
        "draft model learns the answers, so that more of its drafts stay. The owner of the private "
        "model runs all of it, or gives away the folder `answers` in --out, which says of each "
        "place the --top-k likeliest tokens, for `align --answers`. Stops early when drafts get no "
        "better; run again with the same options, it goes on where it was.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--private", type=Path, metavar="DIR", help="the model that answers")
    source.add_argument("--answers", type=Path, metavar="DIR", help="answers that it has given")
    _add_student(parser)
    _add_texts(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the draft model")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="of the answers (default: 1)"
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="likeliest tokens at a place that are learnt, up to the whole vocabulary (default: "
        f"{TOP_K}, as published); six bytes each",
    )
    parser.add_argument(
        "--as-published", action="store_true", help="learn by cross entropy alone (POST, App. A)"
    )
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument(
        "--learning-rate", type=float, default=1e-3, metavar="R", help="at its peak (default: 1e-3)"
    )
    parser.add_argument(
        "--length",
        type=int,
        metavar="N",
        help=f"tokens of a text, at most (default: {LENGTH}, or the models' context)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=_align)


def _add_student(parser: Any) -> None:
    begun = parser.add_mutually_exclusive_group(required=True)
    begun.add_argument("--public", type=Path, metavar="DIR", help="the draft model to begin with")
    begun.add_argument("--blocks", type=int, metavar="N", help="begin with N random blocks")
    begun.add_argument(
        "--keep",
        metavar="I,J,...",
        help="begin with these blocks of the private model, and its table of tokens, which stays: "
        "who gets the draft model gets them, too",
    )
    parser.add_argument("--width", type=int, metavar="N", help="of --blocks (default: as private)")


def _add_texts(parser: Any) -> None:
    texts = parser.add_argument_group("what the private model is asked on (nobody's secrets)")
    texts.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text: it reads parts of it, and writes as much after each",
    )
    texts.add_argument(
        "--chats", type=Path, metavar="FILE", help="JSON Lines, as of calibrate: it answers each"
    )
    texts.add_argument(
        "--write",
        type=int,
        metavar="N",
        help="texts of its own, until N of their tokens are answered; a chat model asks itself",
    )


def _align(options: argparse.Namespace) -> None:
    from models.alignment.fitting import Settings
    from models.alignment.run import ANSWERS, CURVE, align

    _check(options)
    _check_out(options)
    progress = Progress()
    try:
        progress.stage("loading")
        if options.private is not None:
            tokenizer, student = _asked(options, progress)
        else:
            tokenizer, student = options.public, _given(options)
        settings = Settings(
            epochs=options.epochs,
            batch=2048,
            learning_rate=options.learning_rate,
            rejection=0.0 if options.as_published else _REJECTION,
            measured_every=50,
            patience=8,
            seed=options.seed,
        )
        progress.stage("aligning")
        run = align(student, settings, tokenizer, options.out, progress.update)
    finally:
        progress.close()
    first, best, config = run.curve[0], run.best, student.config
    for point in run.curve:
        loss = "" if point.loss is None else f", loss {point.loss:.3f}"
        show(
            f"after {point.tokens} answers: acceptance at least {point.acceptance:.3f}, the same "
            f"likeliest token {point.same:.0%}{loss}"
        )
    show(
        f"{options.out} written: {config.title}, {config.layers} blocks of width {config.width}; "
        f"acceptance {first.acceptance:.3f} before, {best.acceptance:.3f} after {best.tokens} "
        f"answers; the curve is in {CURVE}, answers in {ANSWERS}"
    )


def _check(options: argparse.Namespace) -> None:
    """Raise InputError, before anything is loaded, for options that do not go together."""
    asked = [options.text, options.chats, options.write]
    if options.private is not None and asked == [None] * 3:
        raise InputError("say what the private model is to answer: --text, --chats or --write N")
    if options.answers is not None:
        given = [*asked, options.temperature, options.top_k, options.length]
        if given != [None] * 6:
            raise InputError(
                "--answers holds the answers; leave out --text, --chats, --write, --temperature, "
                "--top-k and --length"
            )
    if options.answers is not None and options.public is None:
        raise InputError("--answers needs --public DIR, the draft model to begin with")
    if options.width is not None and options.blocks is None:
        raise InputError("--width belongs to --blocks; leave it out")
    for name, least, most in (
        ("epochs", 1, 1000),
        ("top_k", 1, 1 << 20),
        ("length", 16, 4096),
        ("blocks", 1, 1000),
        ("write", 1, 1 << 40),
        ("seed", 0, (1 << 31) - 1),
    ):
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            option = name.replace("_", "-")
            raise InputError(f"--{option} must be {least} to {most}, found {value}")
    if options.temperature is not None and not 0.01 <= options.temperature <= 10:
        raise InputError(f"--temperature must be 0.01 to 10, found {options.temperature}")
    if not 0 < options.learning_rate <= 1:
        raise InputError(
            f"--learning-rate must be above 0, 1 at most, found {options.learning_rate}"
        )


def _check_out(options: argparse.Namespace) -> None:
    """Raise InputError where --out is, or holds, something else than an alignment."""
    from models.alignment.run import ANSWERS, CURVE
    from models.files import WEIGHTS_FILE

    out = options.out
    for name in ("private", "public", "answers"):
        given = getattr(options, name)
        if given is not None and out.resolve() == given.resolve():
            raise InputError(f"--out is --{name}, which would be written over; give another")
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out} is a file; give a directory")
    ours = (out / CURVE).exists() or (out / ANSWERS).exists()
    if (out / WEIGHTS_FILE).exists() and not ours:
        raise InputError(f"--out: {out} holds a model that align did not write; give another")


def _asked(options: argparse.Namespace, progress: Progress) -> tuple[Path, Student]:
    """Have the private model answer; return the directory with the tokenizer, and the student."""
    from models.alignment import student
    from models.alignment.answers import Origin
    from models.alignment.run import ANSWERS, ask
    from models.alignment.writing import Writer
    from models.digests import params_digest
    from models.hf import load_uncalibrated
    from models.text_format import TextFormat

    text = TextFormat.of_model(options.private)
    config, params = load_uncalibrated(options.private, encoders=True)
    top_k = options.top_k or TOP_K
    if top_k > config.vocab_size:
        raise InputError(f"--top-k must be at most {config.vocab_size}, the vocabulary")
    if options.public is not None:
        begun = student.of_public(options.public, text.tokenizer.digest, config.encodes)
        begun = student.sharing(begun, params)
    elif options.blocks is not None:
        begun = student.from_nothing(config, options.blocks, options.width, options.seed)
    else:
        begun = student.of_blocks(config, params, _numbers(options.keep))
    context = min(config.context, begun.config.context)
    if (length := options.length or min(LENGTH, context)) > context:
        raise InputError(f"--length must be at most {context}, the models' context")
    if LANES * length * top_k * 8 > MOST_BYTES:
        most = MOST_BYTES // (8 * LANES * length)
        raise InputError(f"--top-k must be at most {most} with texts of {length} tokens")
    given, own = _scripts(options, text, length)
    progress.stage("the private model answers")
    temperature = options.temperature or 1.0
    ends = text.tokenizer.eos_ids
    rows = length // 2 if config.encodes else length - 1
    writer = Writer(config, params, ends, LANES, rows, top_k, temperature)
    asked = hashlib.sha256(repr((given, own, length, options.seed)).encode()).hexdigest()
    model = params_digest(params)
    origin = Origin(model, asked, text.tokenizer.digest, temperature, top_k)
    folder, say = options.out / ANSWERS, progress.update
    ask(writer, iter(given), "given", origin, folder, None, options.seed, say)
    if own is not None:
        ask(writer, repeat(own), "own", origin, folder, options.write, options.seed + 1, say)
    return options.private, begun


def _numbers(given: str) -> list[int]:
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise InputError(f"--keep must be numbers of blocks, as 0,15,29, found {given}") from None


def _scripts(
    options: argparse.Namespace, text: Any, length: int
) -> tuple[list[Script], Script | None]:
    """Return the scripts of the texts that are given, and of the model's own texts. InputError for
    a chat that fills its text.
    """
    from models.alignment import scripts
    from models.alignment.writing import rows_of
    from models.chat import Template
    from spu_llm.app.calibration_texts import messages_in
    from spu_llm.core.text_files import read_text

    given: list[Script] = []
    if text.after_prompt and (options.write is not None or options.chats is not None):
        raise InputError("a model with an encoder writes after texts; give --text alone")
    if options.text is not None:
        tokens = text.tokenizer.encode(read_text(options.text, "--text"))
        given += (
            scripts.of_sources(tokens, length // 2, text.after_prompt)
            if text.after_prompt
            else scripts.of_text(tokens, length // 2)
        )
    if options.chats is not None:
        template = Template.load(options.private)
        for number, (_, messages) in enumerate(messages_in(options.chats, most=None), 1):
            script = scripts.of_chat(template, text.tokenizer, messages, length)
            if rows_of(script) >= length:
                raise InputError(
                    f"chat {number} of {options.chats} leaves no room for an answer in {length} "
                    "tokens; give a larger --length, or leave it out"
                )
            given.append(script)
    if options.write is None:
        return given, None
    return given, scripts.own(text.template, text.tokenizer, length)


def _given(options: argparse.Namespace) -> Student:
    """Return the student of answers that were given, which are copied into --out. InputError where
    that holds others.
    """
    import shutil

    from models.alignment import student
    from models.alignment.answers import digest_of, parts_of, read_answers
    from models.alignment.run import ANSWERS

    answers, origin = read_answers(options.answers)
    encodes = answers[0].source > 0
    begun = student.of_public(options.public, origin.tokenizer, encodes)
    folder = options.out / ANSWERS
    if not parts_of(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in parts_of(options.answers):
            shutil.copyfile(path, folder / path.name)
    elif digest_of(read_answers(folder)[0]) != digest_of(answers):
        raise InputError(f"--out: {folder} holds other answers; give another --out")
    return begun
