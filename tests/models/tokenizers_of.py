"""Tokenizers of SentencePiece's kind, for tests."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors


def sentencepiece(kind: str) -> tokenizers.Tokenizer:
    """Letters, six merges, and a byte for whatever else: what `transformers` makes of LLaMA's
    first tokenizer, or one with `Metaspace` in place of normalizer and decoders.
    """
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁h", "el"), ("▁", "w"), ("o", "r")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcdehlorw", *(a + b for a, b in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    actual = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    actual.add_special_tokens(["<unk>", "<s>", "</s>"])
    if kind == "metaspace":
        actual.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        actual.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        actual.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        actual.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    actual.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return actual
