"""One decoder definition with families, Hugging Face directories in and out, shared ops."""
