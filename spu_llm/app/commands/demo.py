"""`spu-llm demo`: a completion, both parties on this machine."""

from __future__ import annotations

from typing import Any

from spu_llm.app import marking
from spu_llm.app.completing import add_client_options, complete
from spu_llm.app.options import add_folder, add_ranges


def add_command(commands: Any) -> None:
    demo = commands.add_parser("demo", help="both parties on this machine, shipped model pair")
    add_folder(demo, "--model", "the provider's private model directory")
    add_ranges(demo)
    add_client_options(demo)
    add_folder(demo, "--pool", "keep what is made ahead of time, both parties' halves")
    marking.add_provider_option(demo, "of the provider here (default: a key for this run alone); ")
    demo.set_defaults(run=complete, server=None)
