"""Algorithms: the records (`spec.py`, torch-free) and functions of every slot, and the presets made of them."""
