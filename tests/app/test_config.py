"""Options from a file: what they mean, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from spu_llm.app.cli import command_line, main
from spu_llm.app.named_models import NamedModel
from tests.kit.pair import Pair
from tests.kit.paths import ROOT
from tests.kit.patience import END_S
from tests.kit.processes import Start


def parsed(*arguments: str) -> argparse.Namespace:
    return command_line().parse_args(list(arguments))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "spu-llm.toml"


def test_options_of_a_command(file: Path) -> None:
    file.write_text(
        """
        [serve]
        model = "model"
        pool = "/srv/pool"
        listen = "0.0.0.0:9000"
        sessions = 7
        insecure = true
        once = false
        [generate]
        server = "h:1"
        temperature = 0.5
        stop = ["a", "--b"]
        """
    )
    serve = parsed("serve", "--config", str(file))
    assert serve.model == [NamedModel("", file.parent / "model")] and serve.pool == Path(
        "/srv/pool"
    )
    assert (serve.listen, serve.sessions) == ("0.0.0.0:9000", 7)
    assert serve.insecure and not serve.once
    generate = parsed("generate", f"--config={file}", "--temperature", "1", "--stop", "c")
    assert generate.temperature == 1.0 and generate.stop == ["a", "--b", "c"]
    assert generate.server == "h:1"


def test_several_models_lie_beside_the_file(file: Path) -> None:
    (file.parent / "c=d").mkdir()
    file.write_text('[serve]\nmodel = ["a=small", "b=/srv/large", "c=d", "e=f=g"]\nlisten = "h:1"')
    serve = parsed("serve", "--config", str(file), "--model", "z=here")
    assert serve.model == [
        NamedModel("a", file.parent / "small"),
        NamedModel("b", Path("/srv/large")),
        NamedModel("", file.parent / "c=d"),
        NamedModel("e", file.parent / "f=g"),
        NamedModel("z", Path("here")),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[generate]\nservre = 'h:1'", "'servre', which is no option of generate"),
        ("[generate]\nconfig = 'x'", "'config', which is no option"),
        ("[generate]\nno-such = 1", "'no-such', which is no option"),
        ("server = 'h:1'", "'server' stands in no table; put it below [generate]"),
        ("[generate]\ninsecure = 1", "insecure must be true or false, found 1"),
        ("[generate]\nserver = true", "server cannot be True"),
        ("[generate]\nserver = ['a']", "server cannot be ['a']"),
        ("[generate]\nserver = 'h:1'\nnetwork = 'moon'", "invalid choice: 'moon'"),
        ("[generate]\nserver = 'h:1'\nmax-new-tokens = 'x'", "invalid int value: 'x'"),
        ("[generate\n", "is no TOML file"),
        ("\udcff", "line 1 is not UTF-8"),
        (None, "cannot read"),
    ],
)
def test_what_is_no_option_is_refused(
    file: Path, text: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--config", str(file)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_the_examples_are_ones() -> None:
    serve = parsed("serve", f"--config={ROOT / 'deploy' / 'provider.toml'}")
    assert (serve.sessions, serve.client_sessions) == (4, 2) and not serve.insecure
    assert serve.trust == Path("/var/lib/spu-llm/clients.pem")
    gateway = parsed("gateway", f"--config={ROOT / 'deploy' / 'gateway.toml'}")
    assert gateway.server == "provider.example:9000"
    assert gateway.trust == ROOT / "deploy" / "provider.pem"


def test_both_parties_by_one_file(start: Start, pair: Pair, file: Path, tmp_path: Path) -> None:
    file.write_text(
        f"""
        [serve]
        model = "{pair.private}"
        listen = "127.0.0.1:0"
        insecure = true
        [generate]
        draft-model = "{pair.public}"
        prompt = "kanarie"
        insecure = true
        """
    )
    server = start("serve", "--config", str(file), stub="")
    at = f"127.0.0.1:{server.until_listening()}"
    client = start("generate", "--config", str(file), "--server", at, stub="")
    assert client.wait(END_S) == 0, client.stderr
