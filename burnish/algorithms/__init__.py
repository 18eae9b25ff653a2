"""The functions of every slot: advantages, ratios and clips, losses, aggregation, KL, entropy, filters."""
