"""polyturn: multi-turn reinforcement learning of vision-language models as a reproducible pipeline."""

__version__ = "0.1.0"
