"""What the provider of mode mpc receives of one text, in a real session of two processes: the words
of the first message of the prefill, as the numbers that they stand for.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import numpy as np

from experiments.common import commands
from models.split import Split
from models.tokenizer import Tokenizer
from spu_llm.app.progress import Progress
from spu_llm.attacks.split_views import views_of_middle
from spu_llm.core.machine import machine
from spu_llm.core.settings import SpuConfig
from spu_llm.systems.split.secure_viewed import as_rows

SPLIT = Split(1, 1)
TEXT = """def password_of(user, secrets):
    if user not in secrets:
        raise KeyError(user)
    return secrets[user]
"""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = commands.private_model(options)
    progress = Progress()
    try:
        views = views_of_middle(model, SPLIT, [Tokenizer.load(model).encode(TEXT)], progress.stage)
    finally:
        progress.close()
    # Up to 2^33 in size: whole numbers say it all.
    (words,) = views.received
    kept = np.asarray(as_rows(words, SpuConfig().frac_bits), float).round().astype(int)
    return {"text": TEXT, "rows": kept.tolist(), "machine": asdict(machine())}


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    result = measure(options)
    size = np.abs(np.array(result["rows"]))
    commands.conclude(options, result, f"{len(size)} rows, in size up to {size.max():.3g}")
