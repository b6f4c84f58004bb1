"""Options of `spu-llm watermark`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spu_llm.api.defaults import PROMPT
from spu_llm.app.options import add_prompt, add_stop

Run = Callable[[argparse.Namespace], None]

NGRAM, CANDIDATES, CHUNK, NEW_TOKENS = 4, 16, 1, 128
NEXT_TOKENS, VOCAB_SIZE = ("uniform", "zipf"), 32_000
RIVALS = ("aaronson", "kirchenbauer", "kuditipudi")
ABOUT = (
    "A watermark for anything that samples text (Bahri et al., A Watermark for Black-Box Language "
    "Models): of several candidates for the next few tokens a secret key chooses one, and the text "
    "has the distribution that it has without. Whoever has the key finds the mark in the text "
    "alone."
)


def add_keygen(parts: Any, run: Run) -> None:
    keygen = parts.add_parser(
        "keygen",
        help="make a key",
        description="Makes FILE, readable by you alone: a key, and what it marks by. Who has it "
        "can find the mark, and can put it on any text.",
    )
    keygen.add_argument("--out", type=Path, required=True, metavar="FILE")
    keygen.add_argument(
        "--ngram",
        type=int,
        default=NGRAM,
        metavar="N",
        help="units of text that a mark hangs on: fewer outlast more changes, and "
        "come again sooner (default: %(default)s)",
    )
    keygen.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="units are this model's tokens (default: words, whatever writes them)",
    )
    keygen.add_argument(
        "--stems",
        action="store_true",
        help="units are stems of English words, without function words: a mark outlasts other "
        "endings and function words, with --ngram 1 also another order and many a paraphrase; "
        "candidates share more units; not with --tokenizer",
    )
    method = keygen.add_mutually_exclusive_group()
    method.add_argument(
        "--race",
        action="store_true",
        help="no candidates: the noise of a race, of a model whose distribution is "
        "known; needs --tokenizer",
    )
    method.add_argument(
        "--provider",
        action="store_true",
        help="for serve --mark: the noise of a session's places, whatever its "
        "client does; needs --tokenizer, the model's",
    )
    method.add_argument(
        "--scheme",
        choices=RIVALS,
        help="as others mark what a model run here writes, to compare with: Aaronson's rule, "
        "Kirchenbauer's green tokens (which change the text's distribution), Kuditipudi's list; "
        "needs --tokenizer",
    )
    keygen.add_argument(
        "--family",
        default="uniform",
        metavar="F",
        help="distribution of the numbers: uniform, normal, chi2, gamma (default: %(default)s)",
    )
    keygen.add_argument(
        "--gamma-k", type=int, default=1, metavar="K", help="of gamma: the length of chunks"
    )
    _debug(keygen)
    keygen.set_defaults(run=run)


def add_embed(parts: Any, run: Run) -> None:
    embed = parts.add_parser(
        "embed", help="write marked text", description=ABOUT + " The text goes to stdout."
    )
    _key_option(embed, "several keys mark one inside the other, with M^t candidates")
    source = embed.add_mutually_exclusive_group()
    source.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="model directory, run here (default: the shipped private one)",
    )
    source.add_argument(
        "--command",
        dest="program",
        metavar="CMD",
        help='reads lines {"prefix", "n", "max_tokens"}, writes lines '
        '{"sequences": [{"text", "ended"}, ...]}',
    )
    source.add_argument(
        "--endpoint",
        metavar="URL",
        help="a completion endpoint, .../v1/completions; SPU_LLM_API_KEY may hold its key",
    )
    embed.add_argument("--endpoint-model", default="", metavar="NAME")
    add_prompt(embed, PROMPT)
    embed.add_argument(
        "--max-new-tokens", type=int, default=NEW_TOKENS, metavar="N", help="default: %(default)s"
    )
    embed.add_argument(
        "--candidates",
        type=int,
        default=CANDIDATES,
        metavar="M",
        help="for a chunk and key; 0: every token, of a model run here, each of which the history "
        "names, 8 bytes a token of the vocabulary for each that is written (default: %(default)s)",
    )
    embed.add_argument(
        "--chunk",
        type=int,
        default=CHUNK,
        metavar="K",
        help="tokens of a candidate (default: %(default)s)",
    )
    embed.add_argument(
        "--candidates-by",
        default="sample",
        metavar="HOW",
        help="sample: as the model draws; of a model run here also beam: the M most probable "
        "continuations, or paraphrase: one sample that a cheaper model rewrites M times. With "
        "these two the text no longer has the model's distribution (default: %(default)s)",
    )
    embed.add_argument(
        "--paraphraser",
        type=Path,
        metavar="DIR",
        help="of --candidates-by paraphrase: the model that rewrites blocks of the sample, with "
        "the same tokens (default: the shipped public one)",
    )
    embed.add_argument(
        "--spread",
        action="store_true",
        help="candidates of a model run here share their draws, so that fewer are "
        "alike: a stronger mark with --chunk 1, the same distribution of texts",
    )
    embed.add_argument(
        "--delta",
        type=float,
        metavar="D",
        help="of a key of Kirchenbauer's: added to the logarithms of green tokens (default: 2)",
    )
    embed.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="of a model run here or an endpoint (default: %(default)s)",
    )
    add_stop(embed)
    embed.add_argument(
        "--no-history",
        action="store_true",
        help="an n-gram marks whenever it comes, as published; without this, "
        "KEYFILE.history keeps which ones were used, and they mark no further text, "
        "so that all texts together look unmarked",
    )
    _tokenizer_option(embed)
    embed.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    _debug(embed)
    embed.set_defaults(run=run)


def add_detect(parts: Any, run: Run) -> None:
    detect = parts.add_parser(
        "detect",
        help="is a text marked, and where",
        description="p is how often an unmarked text looks as much like a marked one, whatever its "
        "length. Of a text that holds little of the marked one, the parts tell more than p.",
    )
    detect.add_argument("text", type=Path, metavar="TEXT", help="a file; -: standard input")
    _key_option(detect, "several are tested, and joined")
    detect.add_argument(
        "--score",
        metavar="S",
        help="sum, fisher, lrt, the likelihood ratio for --candidates and "
        "--chunk, lrt-published, or green, the largest quarter (default: sum; fisher for a key of "
        "--race or Aaronson's, green for Kirchenbauer's)",
    )
    detect.add_argument(
        "--candidates", type=int, default=CANDIDATES, metavar="M", help="default: %(default)s"
    )
    detect.add_argument(
        "--chunk", type=int, default=CHUNK, metavar="K", help="default: %(default)s"
    )
    detect.add_argument(
        "--join",
        type=float,
        action="append",
        default=[],
        metavar="P",
        help="p of this text by a key that somebody else holds; may be given again",
    )
    detect.add_argument(
        "--alpha",
        type=float,
        default=1e-3,
        metavar="A",
        help="call marked what has p of this or less (default: %(default)s)",
    )
    _add_provider_options(detect)
    _tokenizer_option(detect)
    detect.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    detect.add_argument("--html", type=Path, metavar="FILE", help="write the text, highlighted")
    _debug(detect)
    detect.set_defaults(run=run)


def add_power(parts: Any, run: Run) -> None:
    power = parts.add_parser(
        "power",
        help="how much text a mark takes to be found, by the paper's theorems",
        description="What is proved of texts in which no n-gram comes twice and no two candidates "
        "are alike: AUC by Theorem 4.2 (uniform numbers, one token a candidate), true positives of "
        "the likelihood ratio by Theorem 4.4 (gamma numbers), AUC of the sum of normal numbers. "
        "Text that repeats itself, or has few continuations, stays below.",
    )
    power.add_argument(
        "--tokens",
        type=int,
        action="append",
        metavar="T",
        help="of the text; may be given again, for a row each (default: 50, 100, 200, 400)",
    )
    power.add_argument(
        "--candidates", type=int, default=CANDIDATES, metavar="M", help="default: %(default)s"
    )
    power.add_argument(
        "--chunk",
        type=int,
        default=CHUNK,
        metavar="K",
        help="tokens of a candidate (default: %(default)s)",
    )
    power.add_argument(
        "--alpha",
        type=float,
        default=0.01,
        metavar="A",
        help="false positives of the likelihood ratio (default: %(default)s)",
    )
    power.add_argument(
        "--entropy",
        type=float,
        metavar="H",
        help="of the candidates at a place, in the mean, in nats: Theorem 4.2's alpha (default: "
        "log M, as if no two were ever alike)",
    )
    power.add_argument(
        "--next-token",
        choices=NEXT_TOKENS,
        help="in place of --entropy: what candidates of one token have that are drawn from such a "
        "distribution, computed (the paper's figure 5 simulates it)",
    )
    power.add_argument(
        "--vocab-size",
        type=int,
        default=VOCAB_SIZE,
        metavar="V",
        help="tokens of --next-token (default: %(default)s)",
    )
    power.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    _debug(power)
    power.set_defaults(run=run)


def _add_provider_options(detect: argparse.ArgumentParser) -> None:
    """Add the options that `detect` takes for a provider's key."""
    detect.add_argument(
        "--session",
        metavar="NONCE",
        help="of a provider's key: only the session with this nonce, known "
        "from elsewhere: p is too small for one that an earlier detect has named",
    )
    detect.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR",
        help="of a provider's key: the public model that clients draft with; what "
        "it would have drafted says how the text was made: finds marks in "
        "shorter texts, and about where they are; texts of a client that drafted "
        "otherwise are found as without it",
    )
    detect.add_argument(
        "--references",
        type=int,
        default=0,
        metavar="N",
        help="of a provider's key: also compare with N sessions that never were: "
        "a p by their rank times the sessions that there are (Bonferroni), so down "
        "to sessions / (N + 1); of a key of Kuditipudi's: with N other keys, p down to 1 / (N + 1) "
        "(default: as many as --alpha takes)",
    )


def _key_option(parser: Any, several: str) -> None:
    parser.add_argument(
        "--key",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help=f"as keygen makes it; may be given again: {several}",
    )


def _tokenizer_option(parser: Any) -> None:
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="of a key whose units are tokens (default: that of the model)",
    )


def _debug(parser: Any) -> None:
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
