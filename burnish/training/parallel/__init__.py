"""Data, tensor and sequence parallelism of a learner: process groups, collectives, and the division of a model."""
