"""Average gradients over ranks, for a training loop of one's own that has neither DDP nor FSDP."""

import torch
from torch import Tensor, nn

from mmcp.parallel.collectives import all_reduce
from mmcp.parallel.mesh import Mesh

BUCKET = 8 * 2**20  # numbers that travel in one exchange


@torch.no_grad()
def average_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Average the gradients of all trainable parameters over all ranks; a missing one counts as 0."""
    bucket: list[Tensor] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if bucket and (bucket[0].dtype != parameter.dtype or sum(x.numel() for x in bucket) > BUCKET):
            _average(bucket, mesh)
            bucket = []
        bucket.append(parameter.grad)
    _average(bucket, mesh)


def _average(gradients: list[Tensor], mesh: Mesh) -> None:
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    flat = all_reduce(flat, "sum", group=mesh.world, name="gradients").div_(mesh.world.size)
    for gradient, mean in zip(gradients, flat.split([x.numel() for x in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
