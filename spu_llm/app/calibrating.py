"""`spu-llm calibrate`: choose the ranges of a model from text, in plaintext at its owner."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from spu_llm.app.output import check_output
from spu_llm.app.printing import show
from spu_llm.core.errors import InputError
from spu_llm.core.text_files import read_text

MAX_WINDOWS = 64
WINDOW = 1024  # tokens of text, at most, that are run at a time


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate", help="choose the ranges of a model's activations from text of yours",
        description="Runs the model in plaintext on this machine and writes ranges.json beside its "
        "weights, or --out for serve --ranges. A prompt that leaves the ranges is refused while it "
        "runs; the ranges, powers of two, are known to clients. Give text like the prompts to "
        "come.",
    )  # fmt: skip
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE",
                        help=f"UTF-8; the first {MAX_WINDOWS} parts of {WINDOW} tokens of it are "
                        "used, or of the model's context")  # fmt: skip
    parser.add_argument("--public-prefix", default="", metavar="TEXT",
                        help="what every text will begin with, as in generate: ranges need not "
                        "hold for it (default: what the tokenizer puts before any text)"
                        )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="write the ranges there: of a model's directory that nothing can be "
                        "written into")  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> None:
    import numpy as np

    from models.calibration import calibrated
    from models.files import RANGES_FILE
    from models.hf import load_model, save_ranges
    from models.ranges import as_dict
    from models.tokenizer import Tokenizer
    from spu_llm.app.completing import encoded

    out = options.out or options.model / RANGES_FILE
    check_output(options.out, "--out")
    if options.out is None and options.model.is_dir() and not os.access(options.model, os.W_OK):
        raise InputError(f"{options.model} is read-only; give --out FILE, and serve --ranges FILE")
    text = read_text(options.text, "--text")
    config, params = load_model(options.model)
    if not text:
        raise InputError(f"{options.text} is empty; give text like the prompts to come")
    public, ids = encoded(options.public_prefix, text, Tokenizer.load(options.model))
    if (size := min(config.context - len(public), WINDOW)) < 1:
        raise InputError(
            f"--public-prefix has {len(public)} tokens, but the model's context is "
            f"{config.context}; shorten it"
        )
    windows = [ids[i : i + size] for i in range(0, len(ids), size)][:MAX_WINDOWS]
    texts = [np.array([*public, *window]) for window in windows]
    chosen = calibrated(config, params, texts, len(public))
    save_ranges(out, chosen)
    for name, value in as_dict(chosen).items():
        show(f"{name:20}{value:g}")
    tokens = sum(map(len, windows))
    show(f"{out} written, from {tokens} tokens of text")
