"""The step loop, and the interfaces it is built from: executor and backend."""
