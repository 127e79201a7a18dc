"""Checks of the GPU path on a GPU, runnable with or without pytest: see :mod:`tests.gpu.__main__`."""
