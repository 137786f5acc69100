"""Training on tiered memory: optimizer, partitioning over ranks, precision, checkpoints, the loop."""
