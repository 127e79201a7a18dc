"""The weights of each boundary where they are: on the device, streamed to it, or with the CPU."""
