"""The scheduler state, the parts of schedulers, and the GPU-only schedulers."""
