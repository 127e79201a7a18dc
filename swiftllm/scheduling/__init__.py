"""GPU-only schedulers, and what every scheduler shares: queues, admission, the plan in the making."""
