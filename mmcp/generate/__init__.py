"""Answers of a model, one token after the other, over the ranks that train it."""

from mmcp.generate.answers import generate
from mmcp.generate.choose import GREEDY, Sampling

__all__ = ["GREEDY", "Sampling", "generate"]
