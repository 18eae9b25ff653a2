"""Config keys of other systems: what they are called here, and the translation of verl's rollout correction."""

from burnish.config.foreign_keys.rollout_correction import translate_verl_keys
from burnish.config.foreign_keys.suggestions import counterparts

__all__ = ["counterparts", "translate_verl_keys"]
