"""The learner: packing, micro-batches, optimizers, parallelism, references and sharded checkpoints."""
