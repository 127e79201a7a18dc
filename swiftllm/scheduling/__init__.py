"""Residents, the parts of policies, and the GPU-only policies."""
