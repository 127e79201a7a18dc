"""The engine's step loop, its executor, and the interface of backends."""
