"""`spu-llm inspect`: the ranges of a model, site by site, in plaintext at its owner."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spu_llm.app import calibration_texts
from spu_llm.app.options import add_ranges
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import show, show_table


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="list the ranges of a model's activations: bounds, head-room, cost",
        description="Shows for each block what its weights bound, what a text shows if one is "
        "given, the range, by what it is held, and what that costs. Runs in plaintext on this "
        "machine. Where a text leaves the ranges between two parties, the client is told the "
        "sites; given that text, head-room below 1 shows them here.",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    add_ranges(parser)
    calibration_texts.add_options(parser, required=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list as JSON")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> None:
    from models.family import check_ranges, family_of
    from models.hf import load_model
    from models.inspection import sites, table

    check_output(options.json)
    config, params = load_model(options.model, options.ranges, encoders=True)
    check_ranges(family_of(config).fold(params, config), config)
    texts: list[Any] = []
    public = config.public_rows
    if options.text is not None or options.chats is not None:
        if config.encodes:
            texts = calibration_texts.with_answers(options, config, params)
        else:
            texts, beginning = calibration_texts.texts_of(options, config.context)
            public = max(public, beginning)
    reached = list(sites(config, params, texts, public))
    show_table(table(reached))
    if config.public_rows:
        show(f"the first {config.public_rows} of a text's tokens must be public")
    if config.stream_shift:
        show(f"the residual stream is scaled by 2^-{config.stream_shift}")
    write_json(
        options.json,
        {"model": config.asdict(), "sites": [asdict(s) | {"bytes": s.bytes} for s in reached]},
    )
