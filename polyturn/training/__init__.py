"""The parts of the training loop, which stands in polyturn/grpo.py: updates, checks, metrics, records, checkpoints."""
