"""Real runs of other servers, and the simulator's predictions of them."""
