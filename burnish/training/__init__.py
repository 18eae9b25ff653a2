"""The learner: packing, micro-batches, optimizer, log-probs."""
