"""Models: one decoder definition for all families, Hugging Face directories, heads, LoRA, NF4, and kernels."""
