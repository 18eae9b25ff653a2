"""burnish: reinforcement-learning post-training for language models.

Importing this package is cheap: torch, transformers and the engines load only when something asks for them.
"""

__version__ = "0.1.0"
