"""The operations between the GEMMs: interface, selection, implementations for CPU and GPU, and a reference."""
