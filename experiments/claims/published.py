"""What RESULTS.md says of a model that somebody else trained: an answer, from start to end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from experiments.common.report import both_ways
from experiments.common.saved import under_table


def in_results(files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The same answer, a column for each network, and where it comes from."""
    one = next(iter(files.values()))
    config = one["config"]
    public = len(str(config["request.public_prefix"]).split(","))
    columns = [_column(result) for result in files.values()]
    heads = [result["config"]["network"] for result in files.values()]
    names = {
        "first": "first token, set-up and material included",
        "prefill": "prefill of its secret tokens, online",
        "later": "a later token, online: mean (least to most)",
        "traffic": "a later token, online",
        "offline": "material, all of it",
        "ahead": "made ahead, all of it",
        "online": "online, all of it",
        "all": "everything",
    }
    rows = [f"| {words} | " + " | ".join(c[key] for c in columns) + " |"
            for key, words in names.items()]  # fmt: skip
    table = "\n".join([f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|", *rows])
    text = (
        f"{config['request.prompt_tokens']} secret tokens after {public} in the clear; "
        f"{len(one['token_ids'])} emitted, `{one['text']}`, in {one['steps']} steps after the "
        "prefill."
    )
    return [text, table, under_table(files, [result["machine"] for result in files.values()])]


def _column(result: Mapping[str, Any]) -> dict[str, str]:
    steps, seconds = result["per_step"], result["seconds"]
    took = [step["seconds"] for step in steps]
    online, ahead = (both_ways(result["bytes"][kind]) / 1e6 for kind in ("online", "offline"))
    size, messages = (
        statistics.fmean(step[name] for step in steps) for name in ("bytes", "messages")
    )
    return {
        "first": f"{result['first_token_seconds']:.0f} s",
        "prefill": f"{seconds['prefill']:.1f} s",
        "later": f"{statistics.fmean(took):.1f} s ({min(took):.1f} to {max(took):.1f})",
        "traffic": f"{size / 1e6:.1f} MB, {messages:,.0f} messages",
        "offline": f"{seconds['offline']:.0f} s",
        "ahead": f"{ahead:.0f} MB, {result['messages']['offline']:,} messages",
        "online": f"{online:.0f} MB, {result['messages']['online']:,} messages",
        "all": f"{result['elapsed_seconds']:.0f} s",
    }
