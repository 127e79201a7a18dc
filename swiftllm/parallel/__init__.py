"""Tensor parallelism: several processes, the ranks, that each compute a part of every layer."""
