"""The papers' schedulers: scheduler state and predictions to an iteration plan."""
