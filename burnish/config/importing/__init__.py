"""Recipes from scripts and configs of other systems: `burnish import verl` and `burnish import trl`. Nothing of theirs is executed."""
