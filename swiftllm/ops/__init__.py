"""The operations between the GEMMs: interface, selection, and implementations for CPU, GPU and tests."""
