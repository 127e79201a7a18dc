"""APEX: schedulers, performance model and overlap runtime on top of the swiftllm engine."""
