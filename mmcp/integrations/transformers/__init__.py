"""transformers models over context-parallel ranks: `model = parallelize(model, mesh)`."""

from mmcp.integrations.transformers.parallelize import parallelize

__all__ = ["parallelize"]
