"""Results of the headline's studies, made up."""

from __future__ import annotations

from typing import Any

from tests.experiments.made_up import record


def study() -> dict[str, Any]:
    """Return two prompts on two networks; online is 5 + 6, everything 21 (times seconds)."""
    runs = []
    for network, factor in (("local", 1.0), ("lan", 2.0)):
        for prompt, seconds in (("a", 0.25), ("b", 0.75)):
            wanted = {"network": network, "seconds": factor * seconds}
            runs += [
                record("stock", prompt, **{**wanted, "seconds": 100 * wanted["seconds"]}),  # type: ignore[operator]
                record("ours-standard", prompt, **wanted),
                record("ours-drafted", prompt, **wanted),
                record("ours-drafted", prompt, mode="sampled", **wanted),
            ]
    runs.append(record("stock", "a", network="wan", seconds=9.0))  # has just begun
    return {"runs": runs, "failed": []}


def committed() -> dict[str, Any]:
    """Return the same in a file for each of two networks, with their index; a client had its hint
    of the model from a run over loopback.
    """
    files: dict[str, Any] = {}
    for name, network in (("completions", "local"), ("completions_lan", "lan")):
        runs = [run for run in study()["runs"] if run["asked"]["network"] == network]
        files[name] = {"runs": runs, "failed": []}
    files["completions"]["runs"][0]["costs"]["hint"]["provider_to_client"] = 2_000_000
    index = {name: {"command": f"spu-llm {name}", "quiet": True} for name in files}
    return files | {"index": index}
