"""Slot `curriculum`: which prompts a step draws."""
