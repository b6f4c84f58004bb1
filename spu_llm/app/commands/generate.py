"""`spu-llm generate`: a completion by a provider's model."""

from __future__ import annotations

from typing import Any

from spu_llm.app.completing import add_client_options, complete
from spu_llm.app.options import add_folder, add_identity_options, add_served_model


def add_command(commands: Any) -> None:
    generate = commands.add_parser("generate", help="client: complete a prompt")
    generate.add_argument("--server", required=True, metavar="HOST:PORT")
    add_served_model(generate)
    add_client_options(generate)
    add_folder(generate, "--pool", "keep what is made ahead of time, if the provider does")
    add_identity_options(generate)
    generate.set_defaults(run=complete, model=None, ranges=None)
