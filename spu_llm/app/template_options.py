"""Options of the prompts of `spu-llm dp generate`: a query, or templates in words."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.core.errors import InputError
from spu_llm.core.text_files import read_text

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer
    from spu_llm.systems.dp_text.corpus import Sources
    from spu_llm.systems.dp_text.prompts import Prompts, Templates

_OF_A_TEXT = {"text", "tokens", "ended"}


def add_options(parser: Any) -> None:
    """Add the options of templates."""
    group = parser.add_argument_group(
        "templates",
        "Prompts in words, in place of --query: as a chat where the model has a chat template, "
        "else as text that it goes on with.",
    )
    group.add_argument(
        "--template",
        type=Path,
        metavar="FILE",
        help="the prompt with a reference in it, where {text} stands",
    )
    group.add_argument(
        "--public-template", type=Path, metavar="FILE", help="the same without any reference"
    )
    group.add_argument(
        "--labels",
        default="",
        metavar="NAME,...",
        help="public fields of each line of --references, which templates may name in braces; a "
        "batch has references with the same ones",
    )
    group.add_argument("--system", default="", metavar="TEXT", help="what a chat's system says")
    group.add_argument(
        "--variation-template",
        type=Path,
        metavar="FILE",
        help="of augpe: asks for {text} in other words, {style} if it stands there",
    )


def check(options: argparse.Namespace) -> None:
    """Raise InputError unless there is a query, or both templates, for a method that has them."""
    templates = options.template, options.public_template
    if not all(templates) if options.query is None else any(templates):
        raise InputError("give --query, or both --template and --public-template")
    more = {
        "--labels": options.labels,
        "--system": options.system,
        "--variation-template": options.variation_template,
    }
    for name, value in more.items():
        if value and options.template is None:
            raise InputError(f"{name} is of prompts from --template")
    if options.template is not None and options.server is not None:
        raise InputError("with --server there is --query alone; leave --template out")
    if options.variation_template is not None and options.method != "augpe":
        raise InputError("--variation-template is of --method augpe")
    for name in _OF_A_TEXT & set(_names(options.labels)):
        raise InputError(f"--labels: a text's line has a {name!r} of its own; rename that field")
    if options.labels and options.method == "augpe":
        raise InputError("augpe makes one corpus of all references; leave --labels out")
    if options.labels and options.adjacency == "add-or-remove":
        raise InputError("labels say which references there are: leave --adjacency or them out")


@dataclass(frozen=True)
class AskedPrompts:
    """Prompts that were asked for, before the model is there. references: by their labels."""

    query: str | None
    template: str
    public_template: str
    variation: str | None
    labels: tuple[str, ...]
    system: str
    references: dict[tuple[str, ...], list[str]]

    def sources(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        context: int,
        new_tokens: int,
        reference_tokens: int | None,
    ) -> Sources:
        """Return what texts are made from, with prompts of the model in a directory. InputError
        where its context has no room for them.
        """
        from spu_llm.systems.dp_text.corpus import Sources, of_query
        from spu_llm.systems.dp_text.prompts import prompts_for, with_room

        if self.query is not None:
            prompts = prompts_for(tokenizer, self.query, context, new_tokens, reference_tokens)
            return of_query(prompts, *self.references.values())
        templates = self._templates(directory)
        bare = [templates.prompts(tokenizer, labels, 0) for labels in self._by_name()]
        several = with_room(bare, context, new_tokens, reference_tokens)
        facts: dict[str, Any] = {
            "template": self.template,
            "public_template": self.public_template,
            "system": self.system,
            "labels": list(self.labels),
            "chat": templates.render is not None,
        }
        if self.variation is not None:
            facts["variation_template"] = self.variation
        return Sources(
            list(zip(several, self.references.values(), strict=True)),
            facts,
            {name: [key[i] for key in self.references] for i, name in enumerate(self.labels)},
            self._varying(templates, tokenizer, context, new_tokens),
        )

    def _by_name(self) -> list[dict[str, str]]:
        return [dict(zip(self.labels, key, strict=True)) for key in self.references]

    def _templates(self, directory: Path) -> Templates:
        from models.chat import Template
        from spu_llm.service.rendering import render_apart
        from spu_llm.systems.dp_text.prompts import Templates

        template = Template.of_model(directory)
        render = None if template is None else partial(render_apart, template)
        return Templates(self.template, self.public_template, self.labels, self.system, render)

    def _varying(
        self, templates: Templates, tokenizer: Tokenizer, context: int, new_tokens: int
    ) -> list[Prompts]:
        if self.variation is None:
            return []
        from spu_llm.systems.dp_text.baselines.augpe import variations

        return variations(templates, self.variation, tokenizer, context, new_tokens)


def _names(labels: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in labels.split(",") if name.strip())


def asked(options: argparse.Namespace) -> AskedPrompts:
    """Read what was asked for. InputError for files that cannot be used, before a model is
    loaded.
    """
    from spu_llm.systems.dp_text.baselines.augpe import STYLE
    from spu_llm.systems.dp_text.prompts import Templates, read_labelled

    def text_of(path: Path | None, option: str) -> str | None:
        return None if path is None else read_text(path, option).rstrip("\n")

    labels = _names(options.labels)
    private = text_of(options.template, "--template") or ""
    public = text_of(options.public_template, "--public-template") or ""
    variation = text_of(options.variation_template, "--variation-template")
    if options.query is None:
        Templates(private, public, labels)
        if variation is not None:
            Templates(variation.replace(STYLE, ""), public, labels)
    none = options.adjacency == "add-or-remove"  # whether there is one is no secret to be told
    references = read_labelled(options.references, labels, none=none)
    return AskedPrompts(
        options.query, private, public, variation, labels, options.system, references
    )
