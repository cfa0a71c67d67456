"""The checks of `polyturn doctor`, by what they look at."""
