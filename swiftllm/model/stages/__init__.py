"""The weights of each stage where they are: on the device, streamed to it, or with the CPU."""
