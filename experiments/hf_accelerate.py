"""Train a transformers model in a loop of one's own, with accelerate, over context-parallel ranks.

Run:     python -m experiments.hf_accelerate --ranks 2 --out runs/hf_accelerate
Resume:  add --resume
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from experiments.hf_setup import RandomAnswers, joined_ranks, load_model, pad
from mmcp.integrations.transformers import parallelize
from mmcp.integrations.transformers.trainer import share_batches
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import Mesh


def train(
    mesh: Mesh | None,
    out: str,
    *,
    steps: int = 20,
    accumulation: int = 1,
    resume: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[float], float]:
    """Train on this rank of the mesh; without one, the unmodified model alone. Returns losses and held-out loss."""
    model: Any = load_model(None)
    model.to(dtype)
    accelerator = Accelerator(cpu=True)
    if mesh is not None:
        model = parallelize(model, mesh)
        share_batches(accelerator, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(RandomAnswers(48, seed=1), batch_size=2, collate_fn=pad)
    held_out = DataLoader(RandomAnswers(6, seed=2), batch_size=2, collate_fn=pad)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    start = _resume(accelerator, out) if resume else 0
    losses, step = [], 0
    while step < steps:
        batches = list(loader)
        for first in range(0, len(batches) - accumulation + 1, accumulation):
            if start <= step < steps:
                losses.append(_update(accelerator, model, optimizer, batches[first : first + accumulation]))
                if step + 1 == steps // 2:
                    accelerator.save_state(f"{out}/step_{step + 1}")
            step += 1
    model.eval()
    with torch.no_grad():
        scores = [accelerator.gather_for_metrics(model(**batch).loss.reshape(1)) for batch in held_out]
    return losses, float(torch.cat(scores).mean())


def _update(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict]
) -> float:
    """Make one update from some micro-batches, each token weighing the same in all of them; returns their loss."""
    model.train()
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = model(**batch, num_items_in_batch=count).loss
        accelerator.backward(loss)
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def _resume(accelerator: Accelerator, out: str) -> int:
    found = sorted(Path(out).glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_")))
    if not found:
        raise ValueError(f"{out} holds no step_* to resume from; run without --resume")
    accelerator.load_state(str(found[-1]))
    return int(found[-1].name.removeprefix("step_"))


def main(ranks: int, out: str, resume: bool) -> None:
    """Train on one of `ranks` ranks."""
    with joined_ranks(ranks) as mesh:
        losses, held_out = train(mesh, out, resume=resume)
        if mesh.rank == 0:
            print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}, held out {held_out:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    launch(main, given.ranks, given.ranks, str(given.out), given.resume)
