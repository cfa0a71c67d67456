"""The Megatron-Core learner: a policy with megatron-core's decoder (`policy.build`), and what trains it."""
