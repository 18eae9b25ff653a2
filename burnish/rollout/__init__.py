"""Engines that sample, the driver that runs environments against them, and sources of scored rollouts."""
