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
    found = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    found.add_special_tokens(["<unk>", "<s>", "</s>"])
    if kind == "metaspace":
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        found.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        found.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        found.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return found
