"""The README's headline and figure: medians over complete generations of one network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments import headline
from tests.experiments.headline_results import study


def test_it_is_of_the_network_with_most_runs() -> None:
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
