"""A model's weights: read from a checkpoint or random, as Llama's tensors, fused and quantised."""
