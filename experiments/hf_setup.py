"""What the examples with transformers train when they are given nothing: a tiny random Llama and random answers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

from mmcp.parallel.mesh import Mesh, MeshConfig, build_mesh, device_type_for, process_group

VOCABULARY = 64


def load_model(folder: str | None, *, seed: int = 0) -> transformers.PreTrainedModel:
    """Load a folder that transformers wrote, or make a tiny model."""
    if folder is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


class RandomAnswers(Dataset):
    """Rows of random text with answers of very different lengths, one of a single token among them."""

    def __init__(self, samples: int, *, seed: int, longest: int = 40):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for number in range(samples):
            length = int(torch.randint(8, longest, (), generator=generator))
            ids = torch.randint(2, VOCABULARY, (length,), generator=generator)
            answer = 1 if number % 3 == 0 else int(torch.randint(1, length - 2, (), generator=generator))
            labels = torch.where(torch.arange(length) < length - answer, -100, ids)
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return self.rows[number]


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join rows of different lengths, padded on the right."""
    longest = max(len(row["input_ids"]) for row in rows)

    def joined(name: str, fill: int) -> Tensor:
        return torch.stack(
            [torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=fill) for row in rows]
        )

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {"input_ids": joined("input_ids", 0), "labels": joined("labels", -100), "attention_mask": mask}


@contextmanager
def joined_ranks(ranks: int) -> Iterator[Mesh]:
    """Join the ranks that torchrun or `launch` started, all on the Ulysses axis."""
    with process_group(device_type_for(torch.float32)) as device:
        yield build_mesh(MeshConfig(ulysses=ranks), device=device)
