"""Train a transformers model with transformers' Trainer over context-parallel ranks.

Run:     python -m experiments.hf_trainer --ranks 2 --out runs/hf_trainer          (a tiny random model)
         torchrun --nproc-per-node 8 -m experiments.hf_trainer --ranks 8 --model FOLDER --out runs/hf_trainer
Resume:  add --resume
"""

import argparse
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from experiments.hf_setup import RandomAnswers, joined_ranks, load_model, pad
from mmcp.integrations.transformers.trainer import parallelize_trainer
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import Mesh


def make_trainer(out: str, *, model: str | None = None, steps: int = 20, accumulation: int = 1) -> Trainer:
    """Set up a Trainer as for one process."""
    arguments = TrainingArguments(
        out,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=10,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(
        load_model(model),
        arguments,
        data_collator=pad,
        train_dataset=RandomAnswers(48, seed=1),
        eval_dataset=RandomAnswers(7, seed=2),
    )


def train(mesh: Mesh, out: str, *, resume: bool = False, **options: Any) -> Trainer:
    """Train on this rank of the mesh."""
    trainer = make_trainer(out, **options)
    parallelize_trainer(trainer, mesh)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main(ranks: int, out: str, model: str | None, resume: bool) -> None:
    """Train on one of `ranks` ranks."""
    with joined_ranks(ranks) as mesh:
        trainer = train(mesh, out, model=model, resume=resume)
        if mesh.rank == 0:
            print(f"loss: {trainer.state.log_history[-1]['train_loss']:.4f}\ncheckpoints: {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="folder that transformers wrote; a tiny random model without")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    launch(main, given.ranks, given.ranks, str(given.out), given.model, given.resume)
