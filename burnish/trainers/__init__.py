"""Control flow only: the RL loop and the SFT loop."""
