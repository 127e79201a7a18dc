"""The torch backend: batches as tensors, captured graphs, transfers between the tiers, CPU workers."""
