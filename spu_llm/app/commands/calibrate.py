"""`spu-llm calibrate`: choose the ranges of a model from text, in plaintext at its owner."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from spu_llm.app import calibration_texts
from spu_llm.app.output import check_output
from spu_llm.app.printing import show
from spu_llm.core.errors import InputError


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="choose the ranges of a model's activations from text of yours",
        description="Runs the model in plaintext on this machine and writes ranges.json beside its "
        "weights, or --out for serve --ranges. A prompt that leaves the ranges is refused while it "
        "runs; the ranges, powers of two, are known to clients. Give text like the prompts to "
        "come.",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    calibration_texts.add_options(parser, required=True)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the ranges there: of a model's directory that nothing can be written into",
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> None:
    from models.calibration import calibrated
    from models.files import RANGES_FILE
    from models.hf import load_uncalibrated, save_ranges
    from models.ranges import as_dict

    out = options.out or options.model / RANGES_FILE
    check_output(options.out, "--out")
    if options.out is None and options.model.is_dir() and not os.access(options.model, os.W_OK):
        raise InputError(f"{options.model} is read-only; give --out FILE, and serve --ranges FILE")
    config, params = load_uncalibrated(options.model, encoders=True)
    if config.encodes:
        texts, public = calibration_texts.with_answers(options, config, params), 0
    else:
        texts, public = calibration_texts.texts_of(options, config.context)
    chosen = calibrated(config, params, texts, public)
    save_ranges(out, chosen)
    for name, value in as_dict(chosen).items():
        show(f"{name:20}{_said(value)}")
    tokens = sum(len(text) - public for text in texts)
    show(f"{out} written, from {tokens} tokens of text; spu-llm inspect has them by site")


def _said(value: float | list[float]) -> str:
    if not isinstance(value, list):
        return f"{value:g}"
    least, most = min(value), max(value)
    return f"{least:g} to {most:g}" if least < most else f"{least:g}"
