"""The vision-language model: families, building and loading, pictures, packed forward passes, logprobs."""
