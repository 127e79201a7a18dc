"""APEX: the papers' schedulers, performance model, simulator, timelines, replay and command line, over swiftllm."""
