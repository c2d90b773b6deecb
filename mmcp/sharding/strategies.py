"""All sharding strategies: our own and, from their public descriptions, those it is measured against.

One more is one function in a file of its own or in `rivals`, registered there and imported here.
"""

from mmcp.sharding import balanced, rivals
from mmcp.sharding.layout import STRATEGIES, Strategy

__all__ = ["STRATEGIES", "Strategy", "balanced", "rivals"]
