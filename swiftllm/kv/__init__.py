"""The KV cache: which request holds which blocks, how many blocks fit, and the tensors behind them."""
