"""The simulated experiments about the scheduler `adaptive`: cases, a map, latency under load, wrong profile tables."""
