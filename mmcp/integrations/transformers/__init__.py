"""transformers models over context-parallel ranks: `model = parallelize(model, mesh)`.

`parallelize_trainer` and `share_batches` are in `trainer`, which needs accelerate.
"""

from mmcp.integrations.transformers.gradients import average_gradients
from mmcp.integrations.transformers.parallelize import parallelize
from mmcp.integrations.transformers.towers import DeferredPixels, Step

__all__ = ["DeferredPixels", "Step", "average_gradients", "parallelize"]
