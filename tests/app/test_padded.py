"""Models with more rows than their tokenizer has tokens, as most are published: whole commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spu_llm.app import cli
from spu_llm.systems.watermark.keys import Key, Scheme, write_key
from tests.kit.models import VOCAB, make_pair
from tests.kit.pair import Pair
from tests.kit.processes import Start

RUN_S = 300.0


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return models with more rows than tokens, more in one of them; the draft model lies in a
    cache.
    """
    root = tmp_path_factory.mktemp("padded")
    private, public = make_pair(root, 64, 32)
    cache = root / "models--some--draft"
    snapshot = cache / "snapshots" / "0123"
    for folder in (snapshot, cache / "blobs"):
        folder.mkdir(parents=True)
    for file in public.iterdir():
        blob = file.rename(cache / "blobs" / f"blob-of-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs", blob.name))
    return Pair(private, snapshot)


def test_a_text_is_written_and_ranges_are_chosen(
    padded: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, file = tmp_path / "text", tmp_path / "result.json"
    text.write_text("def read(path):\n    return path\n")
    write_key(tmp_path / "key", Key.from_os(), Scheme(4, units="words"))
    with pytest.raises(SystemExit) as end:
        cli.main(
            [
                "watermark",
                "embed",
                "--model",
                str(padded.private),
                "--key",
                str(tmp_path / "key"),
                "--prompt",
                "def read",
                "--max-new-tokens",
                "12",
                "--json",
                str(file),
            ]
        )
    assert end.value.code == 0, capsys.readouterr().err
    assert max(json.loads(file.read_text())["tokens"]) < VOCAB
    with pytest.raises(SystemExit) as end:
        cli.main(["calibrate", "--model", str(padded.private), "--text", str(text)])
    assert end.value.code == 0, capsys.readouterr().err
    (padded.private / "ranges.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--temperature", "0"],
        ["--standard"],
        ["--verify", "race"],
        ["--verify", "marked", "--temperature", "1"],
        ["--verify", "post", "--show-progress"],
        ["--verify", "naive", "--show-progress"],
        ["--candidates", "2", "--watermark", "key"],
    ],
    ids=" ".join,
)
def test_two_parties_draw_tokens_alone(
    start: Start, padded: Pair, tmp_path: Path, options: list[str]
) -> None:
    if "key" in options:
        write_key(tmp_path / "key", Key.from_os(), Scheme(4, units="words"))
    file = tmp_path / "result.json"
    demo = start(
        *padded.demo, "--prompt", "def read", "--max-new-tokens", "6", "--json", str(file), *options
    )
    assert demo.wait(RUN_S) == 0, demo.stderr
    tokens = json.loads(file.read_text())["token_ids"]
    assert len(tokens) == 6 and max(tokens) < VOCAB
