"""What prefix caches bring: simulated over sizes of the GPU pool, and measured on this machine."""
