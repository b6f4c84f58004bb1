"""Training of a Unigram tokenizer as T5 has it, and writing of its Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from models.training.bpe import write_files

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SENTINEL = "<extra_id_%d>"
PAD_ID, END_ID = 0, 1
_LINE = Regex(r"\n+")


def train_unigram(texts: Iterable[str], vocab_size: int, sentinels: int) -> Tokenizer:
    """Train a Unigram tokenizer of `vocab_size` tokens: first <pad>, </s> and <unk>, and last the
    sentinels, the first of which has the highest number. Pieces may span blanks, and begin at a
    line's end at the latest; every text ends with </s>.
    """
    tokenizer = with_parts(Tokenizer(models.Unigram()))
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - sentinels,
        special_tokens=[PAD, END, UNKNOWN],
        unk_token=UNKNOWN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([SENTINEL % i for i in reversed(range(sentinels))])
    return tokenizer


def with_parts(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with what comes before and after its pieces."""
    # Blanks are kept as they are: source code needs them.
    spaces = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_LINE, "merged_with_next"), spaces]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, END_ID)]
    )
    return tokenizer


def sentinels_of(tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the numbers of the sentinels, in order."""
    i = 0
    while (number := tokenizer.token_to_id(SENTINEL % i)) is not None:
        yield number
        i += 1


def write_unigram(directory: Path, tokenizer: Tokenizer, positions: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"decoder_start_token_id": PAD_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    write_files(directory, tokenizer, settings, generation)
