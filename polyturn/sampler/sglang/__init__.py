"""Sampling by SGLang servers: wire format, client, processes, weights, and the sampler made of them."""
