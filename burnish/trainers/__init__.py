"""Control flow of training: the RL loop, the steps of an algorithm, and the supervised, preference and reward-model loops."""
