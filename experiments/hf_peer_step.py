"""A parallelised Llama under Trainer, among the drivers of the peers: one training step, measured by their `common.py`.

Run:     torchrun --nproc-per-node=2 -m experiments.hf_peer_step --seq 4096        (their folder on PYTHONPATH)
Expect:  one JSON line as every driver prints.

What is timed is Trainer.training_step, as in their driver of Trainer with DeepSpeed's Ulysses.
"""

import tempfile
import time
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer, TrainingArguments

from mmcp.integrations.transformers.trainer import parallelize_trainer
from mmcp.parallel.mesh import MeshConfig, build_mesh, process_group


class OneRow(torch.utils.data.Dataset):
    """The row that all drivers share, for every step."""

    def __init__(self, settings: Any):
        ids, labels = common.batch(settings)
        self.row = {"input_ids": ids[0], "labels": labels[0]}
        self.steps = settings.warmup + settings.steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return self.row


class TimedTrainer(Trainer):
    """A Trainer that notes seconds and loss of each step, and the gradients of the last."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the step between two barriers."""
        dist.barrier()
        begin = time.perf_counter()
        loss = super().training_step(*args, **kwargs)
        dist.barrier()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(loss.item())
        if len(self.seconds) == self.args.max_steps:
            self.gradients = {name: gradient.clone() for name, gradient in common.grad_dict(self.model).items()}
        return loss


def main() -> None:
    """Run the steps that the command line asks for, on this rank."""
    settings = common.parser().parse_args()
    torch.set_num_threads(settings.threads)
    with process_group("cpu") as device, tempfile.TemporaryDirectory() as folder:
        mesh = build_mesh(MeshConfig(ulysses=common.world()), device=device)
        model = common.load_model(settings)
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=1,
            max_steps=settings.warmup + settings.steps,
            learning_rate=0.0,
            optim="sgd",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        collate = torch.utils.data.default_collate
        trainer = TimedTrainer(model, arguments, data_collator=collate, train_dataset=OneRow(settings))
        parallelize_trainer(trainer, mesh)
        before = common._status("VmRSS")
        common.reset_hwm()
        trainer.train()
        found = trainer.seconds, trainer.losses[-1], trainer.gradients
        common.report(settings, "mmcp-trainer", *found, common._status("VmHWM"), before, note="Trainer, parallelize")


if __name__ == "__main__":
    main()
