"""A learner on several ranks: who does which part of the work, and what they tell each other."""
