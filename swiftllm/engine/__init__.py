"""The engine's step loop, and its interfaces to executor and backend."""
