"""The families our decoder covers: one row each.

A family that is Llama with a flag or two is all in its row. One that differs in more has a file beside this one, which
says how its config.json is read and written, what of it is not covered, and what its tensors are called.
"""

from burnish.models.families.family import Family, attention_bias, biases, window
from burnish.models.families.gemma3 import GEMMA3

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", read=biases),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, read=attention_bias),
    "mistral": Family("MistralForCausalLM", read=window.read, write=window.write),
    "gemma3_text": GEMMA3,
}

__all__ = ["FAMILIES", "Family"]
