"""The machine on a virtual clock: the backend, and the ways of KV cache, Q and weights over PCIe and network."""
