"""From Samples to new weights: packing, loss, optimizer, checkpoints."""
