"""The ablation of `scripts/ablation.py`: the same requests with strategies forced, disabled or run synchronously."""
