"""The checkout as a pipeline: which stage is stale and why, where runs work, leases, what a run was made of; no torch."""
