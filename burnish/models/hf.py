"""Any other architecture: transformers does the forward. Slower than our decoder, and correct.

Sequences are right-padded for the call (transformers knows no packed batches for every architecture); log-probs come
from its logits, so the memory of [tokens, vocab] is paid here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.core.batch import from_padded, to_padded
from burnish.models.weights import weight_files


class TransformersPolicy(nn.Module):
    """A causal language model of transformers behind the interface of our decoder."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner.eval()  # no dropout: the log-probs trained on must be those sampled from

    @staticmethod
    def load(directory: Path, dtype: torch.dtype, device: torch.device) -> TransformersPolicy:
        """From a local directory; no code from it is run, no pickle is opened."""
        from transformers import AutoModelForCausalLM

        weight_files(directory)
        try:
            inner = AutoModelForCausalLM.from_pretrained(
                str(directory), dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"transformers cannot load {directory}: {error}") from error
        policy = TransformersPolicy(inner)
        policy.to(device)
        return policy

    def token_logprobs(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token given its past) at the `wanted` positions, and entropies if asked."""
        lengths = offsets.diff()
        padded = to_padded(tokens, offsets)
        real = torch.arange(padded.shape[1], device=tokens.device) < lengths[:, None]
        logits = self.inner(input_ids=padded, attention_mask=real.long(), use_cache=False).logits
        packed, _ = from_padded(logits, lengths)
        logits = packed[wanted - 1]
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        log_p = (logits / temperature).log_softmax(-1)
        logp = log_p.gather(1, tokens[wanted][:, None]).squeeze(1)
        return logp, -(log_p.exp() * log_p).sum(-1) if with_entropy else None

    def save(self, directory: Path) -> None:
        """A Hugging Face directory (weights and configs)."""
        self.inner.save_pretrained(str(directory))
