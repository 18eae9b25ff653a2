"""Tokenizers made by tests: characters and merged pairs, byte-level, and SentencePiece with byte tokens."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from burnish.models.tokenizer import EOS, PAD, Tokenizer


def wrapped(backend: Any, eos: str = EOS, **options: Any) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=eos, **options))


def merging(characters: str, *merges: tuple[str, str], eos: str = EOS) -> Tokenizer:
    """One token per character, and one for each pair that merges."""
    pieces = [PAD, eos, *characters, *(a + b for a, b in merges)]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    backend.decoder = decoders.Fuse()
    return wrapped(backend, eos)


def byte_level(*merges: tuple[str, str], eos: str = "<|end|>", **options: Any) -> Tokenizer:
    """One token per byte, and one for each pair of byte strings that merges; `Ġ` is a space."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(a + b for a, b in merges)]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend, eos, **options)


def sentence_piece(*pieces: str) -> Tokenizer:
    """A unigram model with byte tokens and a space put before the text, as Llama 2 has."""
    scored = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    scored += [(piece, -1.0 / len(piece)) for piece in pieces]
    backend = Backend(models.Unigram(scored, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(backend, "</s>")
