"""The policy loss of an update: pure functions on the trained tokens of a micro-batch."""

from __future__ import annotations

from polyturn.loss.aggregation import token_weights
from polyturn.loss.policy import LossInputs, LossTerms, policy_loss
from polyturn.loss.sums import MetricSums, merged

__all__ = ["LossInputs", "LossTerms", "MetricSums", "merged", "policy_loss", "token_weights"]
