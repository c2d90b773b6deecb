"""Trainer, accelerate and TRL on a parallelised model: ranks of one context-parallel group act as one process.

They hand each process batches of its own and count processes, not groups. Here the ranks of a group get the same
batches and give one answer to metrics. Losses and gradients need nothing more: a group's ranks return the same loss,
and the average of their gradients, which DDP and FSDP take, is that of one process (see `parallelize`).
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer

from mmcp.integrations.transformers.parallelize import parallelize
from mmcp.parallel.collectives import Group
from mmcp.parallel.mesh import Mesh


def parallelize_trainer(trainer: Trainer, mesh: Mesh, **options: Any) -> Trainer:
    """Run the model of a Trainer, or of one derived from it such as TRL's, over `mesh`; returns the same trainer.

    Call it before trainer.train(). options: those of `parallelize`
    Raises ValueError for a model or a training option that cannot be split.
    """
    if trainer.compute_metrics is not None or trainer.label_smoother is not None or trainer.compute_loss_func:
        raise ValueError(
            "compute_metrics, label_smoothing_factor and compute_loss_func need the logits of whole batches, which "
            "are on no rank under context parallelism; leave them out"
        )
    if trainer.neftune_noise_alpha is not None:
        raise ValueError(
            f"neftune_noise_alpha={trainer.neftune_noise_alpha} adds noise that depends on the rank; leave it out"
        )
    assert trainer.model is not None, "a Trainer made it"
    parallelize(trainer.model, mesh, **options)
    trainer.args.prediction_loss_only = True
    share_batches(trainer.accelerator, mesh)
    trainer.gather_function = trainer.accelerator.gather_for_metrics
    return trainer


def share_batches(accelerator: Accelerator, mesh: Mesh) -> Accelerator:
    """Let an Accelerator deal batches to context-parallel groups instead of processes; returns the same accelerator.

    Call it before accelerator.prepare(). With dp groups of ranks, `gather_for_metrics` joins one answer of each group.
    """
    accelerator.prepare_data_loader = MethodType(_prepare_for(mesh.data), accelerator)
    accelerator.gather_for_metrics = MethodType(_gather_for(mesh), accelerator)
    return accelerator


def _gather_for(mesh: Mesh) -> Callable[..., Any]:
    """Make accelerate's gather_for_metrics for groups: one answer of each, without those that fill up an epoch."""

    def gather(accelerator: Accelerator, values: Any, use_gather_object: bool = False) -> Any:
        def join(x: Tensor) -> Tensor:
            if mesh.data.size > 1:
                x = accelerator.gather(x).view(mesh.world.size, -1, *x.shape[1:])[:: mesh.cp.size].flatten(0, 1)
            state = accelerator.gradient_state
            return x[: state.remainder] if state.end_of_dataloader and state.remainder > 0 and x.ndim else x

        if use_gather_object:
            raise ValueError("objects are not gathered over groups of ranks; gather tensors")
        return recursively_apply(join, values, error_on_other_type=True)

    return gather


def _prepare_for(data: Group) -> Callable[..., DataLoader]:
    """Make accelerate's prepare_data_loader for a group's place among the data-parallel groups."""

    def prepare(
        accelerator: Accelerator, loader: DataLoader, device_placement: bool | None = None, slice_fn: Any = None
    ) -> DataLoader:
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=data.size,
            process_index=data.index,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    return prepare
