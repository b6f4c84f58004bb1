"""Corpus, batches, optimiser loop and evaluation, on tiny text and tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.draft import Drafter
from models.family import Params
from models.gpt2 import GPT2Config, init_params
from models.tokenizer import Tokenizer
from models.training import batches as windows
from models.training import corpus, evaluate, snippets
from models.training.bpe import train_tokenizer, write_tokenizer
from models.training.optimise import Loss, Schedule, cross_entropy, distillation, fit
from spu_llm.core.errors import InputError
from tests.models.training_figures import FIGURES

TEXT = "import os\n\n\n" + "".join(
    f'def f{i}(x):\n    """Add {i}."""\n    return x + {i}\n\n\n' for i in range(40)
)
CONFIG = GPT2Config(vocab_size=288, n_positions=16, n_embd=16, n_layer=1, n_head=2)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small standard library in place of the interpreter's."""
    root = tmp_path / "library"
    for path in [f"m{i}.py" for i in range(60)] + ["test/t.py", "pkg/tests/t.py", "pkg/a.py"]:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(TEXT)
    (root / "empty.py").write_text("\n")
    (root / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(corpus, "library_directory", lambda: root)
    return root


def test_corpus_skips_tests_and_text_that_is_not_utf8(library: Path) -> None:
    files = corpus.list_files()
    paths = [f.path for f in files]
    assert paths == sorted([f"m{i}.py" for i in range(60)] + ["pkg/a.py"])
    assert 0 < sum(f.held_out for f in files) < 15
    assert files == corpus.list_files()


def test_manifest_round_trip(library: Path, tmp_path: Path) -> None:
    files = corpus.list_files()
    corpus.write_manifest(tmp_path / "corpus.json", files)
    assert corpus.read_manifest(tmp_path / "corpus.json") == files


def test_the_shipped_manifest_agrees_with_the_split() -> None:
    files = corpus.read_manifest(snippets.SHIPPED / "corpus.json")
    assert all(f.held_out == corpus.is_held_out(f.path) for f in files)
    held_out = {f.path for f in files if f.held_out}
    shipped = snippets.read_snippets()
    assert len(shipped) >= 64 and {s.file for s in shipped} <= held_out


def test_snippets_begin_where_a_users_prompt_does(library: Path) -> None:
    files = corpus.list_files()

    def cut(seed: int) -> list[snippets.Snippet]:
        return snippets.cut_snippets(files, 8, 200, seed)

    actual = cut(1)
    assert actual == cut(1) != cut(2) and len(actual) == 8
    assert {s.file for s in actual} <= {f.path for f in files if f.held_out}
    for text in (s.text for s in actual):
        assert text in TEXT and text.startswith(("import", "def")) and len(text) <= 200
    with pytest.raises(InputError, match="ask for fewer"):
        snippets.cut_snippets(files, 10_000, 200, 1)


def test_snippets_round_trip(tmp_path: Path) -> None:
    wanted = [snippets.Snippet("a.py", "x = 1\ny = '→'"), snippets.Snippet("b.py", "")]
    snippets.write_snippets(tmp_path / "s.jsonl", wanted)
    assert snippets.read_snippets(tmp_path / "s.jsonl") == wanted
    (tmp_path / "s.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="is not a file of snippets"):
        snippets.read_snippets(tmp_path / "s.jsonl")
    with pytest.raises(InputError, match="is missing"):
        snippets.read_snippets(tmp_path / "absent")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, train_tokenizer([TEXT], CONFIG.vocab_size), CONFIG.n_positions)
    return Tokenizer.load(directory)


def test_trained_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == CONFIG.vocab_size
    assert tokenizer.eos_ids == {windows.END}
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 2


def test_windows_tile_the_text() -> None:
    documents = [np.arange(1, 30), np.arange(30, 44)]
    actual = windows.consecutive_windows(documents, 8)
    assert actual.shape == (6, 8)
    assert np.concatenate([actual[0, :1], *actual[:, 1:]]).tolist() == list(range(1, 44))


def test_batches_repeat_and_start_at_documents_and_lines() -> None:
    bpe = train_tokenizer([TEXT], CONFIG.vocab_size)
    documents = windows.encode_documents(bpe, [TEXT] * 8)
    assert all(d[0] == windows.END and end_once(d) for d in documents)

    def take(seed: int) -> np.ndarray:
        stream = windows.batches(bpe, documents, 17, 4, np.random.default_rng(seed))
        return np.stack([next(stream) for _ in range(200)])

    actual = take(0)
    assert actual.shape == (200, 4, 17)
    assert np.array_equal(actual, take(0)) and not np.array_equal(actual, take(1))
    first = actual[:, :, 0].ravel()
    assert np.mean(first == windows.END) > windows.DOCUMENT_START_SHARE / 2
    definition = bpe.encode("def").ids[0]
    assert np.mean(first == definition) > windows.LINE_START_SHARE / 2


def end_once(document: np.ndarray) -> bool:
    return int(np.sum(document == windows.END)) == 1


@pytest.mark.slow
def test_training_and_distillation_reduce_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    bpe = train_tokenizer([TEXT], CONFIG.vocab_size)
    documents = windows.encode_documents(bpe, [TEXT] * 2)
    held_out = windows.consecutive_windows(documents, CONFIG.n_positions + 1)[:4]
    schedule = Schedule(steps=40, batch=4, learning_rate=1e-2, warmup=5, save_every=20)
    rows = jnp.asarray(held_out)
    saved: list[Params] = []

    def run(loss: Loss, frozen: Params) -> Params:
        stream = windows.batches(bpe, documents, CONFIG.n_positions + 1, 4, rng)
        start = init_params(CONFIG, jax.random.key(0))
        actual = fit("tiny", start, loss, frozen, stream, held_out, schedule, saved.append)
        return jax.tree.map(jnp.asarray, actual)

    rng = np.random.default_rng(0)
    entropy = cross_entropy(CONFIG)
    before = float(entropy(init_params(CONFIG, jax.random.key(0)), {}, rows))
    teacher = run(entropy, {})
    assert float(entropy(teacher, {}, rows)) < 0.7 * before
    assert len(saved) == 2 and "min left" in capsys.readouterr().out

    kl = distillation(CONFIG, CONFIG, kl=1.0, rejection=1.0, truth=0.0)
    assert abs(float(kl(teacher, teacher, rows))) < 1e-4  # a model is its own best student
    start = float(kl(init_params(CONFIG, jax.random.key(0)), teacher, rows))
    student = run(kl, teacher)
    assert float(kl(student, teacher, rows)) < 0.7 * start


def test_expected_tokens() -> None:
    assert evaluate.expected_tokens(0.0, 5) == 1.0
    assert evaluate.expected_tokens(0.5, 2) == pytest.approx(1.75)


def model(seed: int) -> evaluate.Model:
    """Random weights far from zero, with room for a prompt and its completion."""
    config = GPT2Config(288, evaluate.NEW_TOKENS + 32, n_embd=16, n_layer=1, n_head=2)
    params = init_params(config, jax.random.key(seed))
    return evaluate.Model(config, jax.tree.map(lambda w: w * 3 if w.ndim > 1 else w, params))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_model_accepts_what_it_drafted_itself(temperature: float) -> None:
    same = model(0)
    drafter = Drafter(same.config, same.params, same.config.n_positions)  # type: ignore[attr-defined]
    prompts, rng = [[1, 2, 3], [4, 5, 6, 7]], np.random.default_rng(0)
    speed = evaluate.simulate(evaluate.Verifier(same), drafter, prompts, 3, temperature, rng)
    assert speed.accepted > 0.99 and speed.tokens_per_step > 3.95
    other = model(1)
    drafter = Drafter(other.config, other.params, other.config.n_positions)  # type: ignore[attr-defined]
    worse = evaluate.simulate(evaluate.Verifier(same), drafter, prompts, 3, temperature, rng)
    assert worse.accepted < 0.9


def test_compare(tokenizer: Tokenizer) -> None:
    private, public = model(0), model(1)
    count, p, q, alpha, agreement = evaluate.compare(tokenizer, private, private, [TEXT])
    assert count > 0 and p == q and alpha == pytest.approx(1) and agreement == 1
    _, p, q, alpha, _ = evaluate.compare(tokenizer, private, public, [TEXT])
    assert 0 < alpha < 1 and p.perplexity > 1 and q.bits_per_byte > 0


def test_an_evaluation_is_written_with_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "evaluate", lambda directory: FIGURES)
    file = tmp_path / "shipped.json"
    monkeypatch.setattr("sys.argv", ["evaluate", "--json", str(file)])
    evaluate.main()
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["machine"]["commit"] and written["private"]["perplexity"] == 42.746
    shown = capsys.readouterr().out
    assert evaluate.markdown(written) + "\n" == shown
    assert "| private | 42.75 | 1.721 |" in shown and "38,003 held-out tokens" in shown
    assert "temperature 1 ᵖ | 2.68 | 3.20 | 3.48 | 3.63 |" in shown
    assert "| simulated, temperature 0.7 | 2.20 | 3.20 | 4.20 | 5.20 |" in shown
    assert "| simulated, greedy | 1.50 | 2.50 | 3.50 | 4.50 |" in shown
    assert "```python\ndef read_config(path): pass\n```" in shown
