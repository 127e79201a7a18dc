"""The simulator beside what was measured: on this machine, in real runs of vLLM, and operator by operator."""
