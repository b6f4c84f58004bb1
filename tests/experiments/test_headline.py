"""The README's headline and figure: medians over complete generations of one network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from experiments import headline
from tests.experiments.test_completions import record


def study() -> dict[str, Any]:
    """Two prompts on two networks; online is 5 + 6, everything 21 (times seconds)."""
    runs = []
    for network, factor in (("local", 1.0), ("lan", 2.0)):
        for prompt, seconds in (("a", 0.25), ("b", 0.75)):
            wanted = {"network": network, "seconds": factor * seconds}
            runs += [
                record("stock", prompt, **{**wanted, "seconds": 100 * wanted["seconds"]}),
                record("ours-standard", prompt, **wanted),
                record("ours-drafted", prompt, **wanted),
                record("ours-drafted", prompt, mode="sampled", **wanted),
            ]
    runs.append(record("stock", "a", network="wan", seconds=9.0))  # has just begun
    return {"runs": runs, "failed": []}


def committed() -> dict[str, Any]:
    """The same in a file for each of two networks, with their index; a client had its hint of the
    model from a run over loopback.
    """
    files: dict[str, Any] = {}
    for name, network in (("completions", "local"), ("completions_lan", "lan")):
        runs = [run for run in study()["runs"] if run["asked"]["network"] == network]
        files[name] = {"runs": runs, "failed": []}
    files["completions"]["runs"][0]["costs"]["hint"]["provider_to_client"] = 2_000_000
    index = {name: {"command": f"spu-llm {name}", "quiet": True} for name in files}
    return files | {"index": index}


def test_it_is_of_the_network_with_most_runs_and_of_several_the_last() -> None:
    assert headline.main_group(study()) == ("lan", 32)
    study_of_local = {"runs": study()["runs"][:9]}
    assert headline.main_group(study_of_local) == ("local", 32)


def test_its_sentences() -> None:
    text = " ".join(headline.headline(study(), timed=True).split())
    assert "4 drafted, 2 stock" in text
    # 11 and 21 thousand (and half of them back), by 32 tokens.
    assert "**0.344 messages and 0.000516 MB a token online**, against 0.344 messages" in text
    assert "end 0.656 messages and 0.000984 MB, against" in text
    # The medians of 0.5 and 1.5 times 11 / 32 and 21 / 32.
    assert "**0.344 s a token online on an emulated LAN** (0.172 to 0.516), against 34.4 s" in text
    assert "with everything 0.656 s, against 65.6 s" in text
    assert " s a token" not in headline.headline(study(), timed=False)


@pytest.mark.parametrize("timed", [True, False])
def test_the_figure(timed: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "traffic.svg"
    headline.plot_traffic(study(), file, timed=timed)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text(encoding="utf-8"))
    assert {"spu-llm, drafted", "spu-llm, one token a step", "GPT-2 whole in SPU"} <= set(texts)
    assert ("0.344 online (0.172 to 0.516)" in texts) == timed
    assert ("65.6 in all (32.8 to 98.4)" in texts) == timed
    assert "seconds per token, lan" in texts or not timed
