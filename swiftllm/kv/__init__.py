"""The KV cache: block tables of requests, sizing of the tiers, and the tensors that hold them."""
