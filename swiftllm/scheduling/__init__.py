"""GPU-only schedulers, and the parts that all schedulers share: queues, admission checks, plan drafts."""
