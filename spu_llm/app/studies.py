"""The commands `bench`, `experiment` and `estimate`: measurements that live in `experiments/`.

Each runs both parties on this machine, as `demo` does, and ends with exit code 1 when a criterion
does not hold. Its module has `add_options(parser)` and `command(options)`, and is imported once the
command is chosen.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

GROUPS = {  # what their commands are called together
    "bench": ("part", "measure the cost of parts"),
    "experiment": ("claim", "reproduce a claim"),
}
STUDIES = {
    "bench step": (
        "experiments.benchmarks.step_sweep",
        "a decode step against its number of positions",
    ),
    "bench op": (
        "experiments.benchmarks.op_bench",
        "a protocol op beside SPU's own way to its result",
    ),
    "bench products": (
        "experiments.benchmarks.products_bench",
        "silent products with weights, by matrix",
    ),
    "bench producers": (
        "experiments.benchmarks.producers",
        "how fast pairs of producers on a cluster make correlated randomness",
    ),
    "bench network": (
        "experiments.benchmarks.network_bench",
        "what emulated networks give: round trips, throughput",
    ),
    "bench connection": (
        "experiments.benchmarks.connection",
        "what relay and TLS add to a decode step",
    ),
    "bench verify": (
        "experiments.benchmarks.verify_bench",
        "secure verification beside a decoder block of SPU's",
    ),
    "experiment logits": ("experiments.fidelity.logits", "secure logits against float32"),
    "experiment fidelity": (
        "experiments.fidelity.pieces",
        "a chat model's logits, ranges and answers by pieces",
    ),
    "experiment fidelity-shares": (
        "experiments.fidelity.shares",
        "a chat model's logits on shares against float32",
    ),
    "experiment answers": (
        "experiments.fidelity.answers",
        "whole answers of a chat model between two processes",
    ),
    "experiment transcript": (
        "experiments.completions.transcript",
        "whether message sizes and counts depend on secrets",
    ),
    "experiment cost": ("experiments.completions.cost", "a step: the stock path's against ours"),
    "experiment completions": (
        "experiments.completions.study",
        "complete generations: ours and the stock path, all that they cost",
    ),
    "experiment speedup": (
        "experiments.completions.speedup",
        "drafted against standard decoding, whole runs, by network and backend",
    ),
    "experiment trees": (
        "experiments.completions.trees",
        "one chain of drafts against several, at equal numbers of positions",
    ),
    "experiment alignment": (
        "experiments.completions.alignment",
        "what alignment does to acceptance, by task set",
    ),
    "experiment lengths": (
        "experiments.completions.lengths",
        "whether the length of drafts should follow how many stayed",
    ),
    "experiment drafts": (
        "experiments.completions.drafts",
        "how many drafts stay: n-grams, a draft model, both",
    ),
    "experiment stock-options": (
        "experiments.spu_baseline.options",
        "bytes and messages of the stock path under SPU's own options",
    ),
    "experiment gateway-load": (
        "experiments.gateway.study",
        "the HTTP gateway under load and under faults",
    ),
    "experiment gateway-chat": (
        "experiments.gateway.chatting",
        "a chat through the gateway, with its correlated randomness made before and not",
    ),
    "experiment latency": (
        "experiments.completions.latency",
        "latency against input length, by kind of layer",
    ),
    "experiment obfuscation": (
        "experiments.confidential.obfuscation",
        "how many fake prompts there are for a secret",
    ),
    "experiment fakes": (
        "experiments.confidential.fakes",
        "what the number of fakes of a secret depends on: length, kind, spelling, model",
    ),
    "experiment personal": (
        "experiments.confidential.personal",
        "how many fakes personal data has, by its class",
    ),
    "experiment vault-memory": (
        "experiments.confidential.vault_memory",
        "a vault's memory against its fakes, exact and compact",
    ),
    "experiment confidential": (
        "experiments.confidential.study",
        "confidential prompting: latency, throughput and memory of its systems",
    ),
    "experiment dp-text": (
        "experiments.dp_text.command",
        "differentially private text: utility against model calls, by method",
    ),
    "experiment noir": (
        "experiments.split.study",
        "split models: NOIR's codebook, what it costs and what it keeps from the host",
    ),
    "experiment noir-parts": (
        "experiments.split.parts",
        "split models: what each part of NOIR is for, in utility and against attacks",
    ),
    "experiment noir-tuning": (
        "experiments.split.tuning",
        "split models: utility by the tokens that NOIR's ends are tuned on",
    ),
    "experiment watermark": (
        "experiments.watermark.command",
        "a watermark: how it is found, what it changes, edits, forgery, drafts",
    ),
    "experiment watermark-long": (
        "experiments.watermark.long",
        "a watermark: long texts and chunks, many candidates, prompts by their entropy",
    ),
    "experiment watermark-entropy": (
        "experiments.watermark.entropy",
        "a watermark: long answers of a chat model, prompts by their entropy",
    ),
    "experiment watermark-drawing": (
        "experiments.watermark.drawing",
        "a watermark: how its candidates are best drawn, at equal numbers of them",
    ),
    "experiment watermark-variants": (
        "experiments.watermark.variants",
        "a watermark: beams and paraphrases as candidates, stems as units, a model's paraphrase",
    ),
    "experiment split": (
        "experiments.split.runs",
        "split models: a token by mode, beside all on shares",
    ),
    "experiment split-client": (
        "experiments.split.client",
        "split models: the client's memory and seconds, beside those of the whole model",
    ),
    "experiment split-view": (
        "experiments.split.view",
        "split models: what the provider receives of a text in mode mpc",
    ),
    "experiment watermark-runs": (
        "experiments.watermark.runs",
        "private text marked by candidates: a token, beside unmarked ones",
    ),
    "experiment scale": (
        "experiments.benchmarks.scale",
        "a completion by a model of GPT-2 small's shape",
    ),
    "experiment prices": (
        "experiments.cost_model.prices",
        "what `estimate` computes with, on this machine: runs of small models",
    ),
    "experiment capacity": (
        "experiments.cost_model.capacity",
        "tokens an hour of several machines at each party, predicted by the cost model",
    ),
    "experiment exact": (
        "experiments.completions.exact",
        "exact messages and bytes, and whether the documents say the same",
    ),
    "estimate": (
        "experiments.cost_model.estimate",
        "what a completion would cost: a larger model, another network",
    ),
}


def add_command(commands: Any) -> None:
    """Add the study commands to the parser."""
    places = {"": commands}
    for group, (name, words) in GROUPS.items():
        parser = commands.add_parser(group, help=words)
        places[group] = parser.add_subparsers(dest=name, required=True)
    for command, (module, words) in STUDIES.items():
        group, _, name = command.rpartition(" ")
        places[group].add_parser(name, help=words, fill=functools.partial(_fill, module))


def _fill(module: str, parser: Any) -> None:
    study = import_module(module)
    study.add_options(parser)
    parser.set_defaults(run=study.command)
