"""Fine-tune a transformers model with TRL's SFTTrainer over context-parallel ranks.

Run:     python -m experiments.hf_sft --ranks 2 --out runs/hf_sft
Resume:  add --resume
"""

import argparse
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from experiments.hf_setup import VOCABULARY, RandomAnswers, joined_ranks, load_model
from mmcp.integrations.transformers.trainer import parallelize_trainer
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import Mesh


def make_trainer(out: str, *, steps: int = 20, accumulation: int = 1, packing: bool = False) -> SFTTrainer:
    """Set up an SFTTrainer as for one process, on prompts and completions that are token ids already."""
    arguments = SFTConfig(
        out,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=10,
        logging_steps=1,
        max_length=64,
        packing=packing,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    return SFTTrainer(
        load_model(None),
        arguments,
        train_dataset=_dataset(48, seed=1),
        eval_dataset=_dataset(7, seed=2),
        processing_class=_tokenizer(),
    )


def _dataset(samples: int, *, seed: int) -> Dataset:
    rows = [
        {"input_ids": row["input_ids"].tolist(), "completion_mask": (row["labels"] != -100).long().tolist()}
        for row in RandomAnswers(samples, seed=seed).rows
    ]
    return Dataset.from_list(rows)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")


def train(mesh: Mesh, out: str, *, resume: bool = False, **options: Any) -> SFTTrainer:
    """Train on this rank of the mesh."""
    trainer = make_trainer(out, **options)
    parallelize_trainer(trainer, mesh)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main(ranks: int, out: str, resume: bool) -> None:
    """Train on one of `ranks` ranks."""
    with joined_ranks(ranks) as mesh:
        trainer = train(mesh, out, resume=resume)
        if mesh.rank == 0:
            print(f"loss: {trainer.state.log_history[-1]['train_loss']:.4f}\ncheckpoints: {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    launch(main, given.ranks, given.ranks, str(given.out), given.resume)
