"""Where the weights of each stage are while a model runs: on the GPU, streamed over PCIe, or with the CPU."""
