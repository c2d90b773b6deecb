"""Weights of others in and out: folders of transformers' Llama 3, Qwen2, Qwen3 and Qwen3-Next.

Here are the names and slices of a checkpoint; that each rank reads only its part is `mmcp.parallel.pretrained`'s.
"""

from mmcp.model.pretrained import dense, qwen3_next
from mmcp.model.pretrained.families import FAMILIES, family_for
from mmcp.model.pretrained.folder import ModelFolder
from mmcp.model.pretrained.rows import Decoder, Rows
from mmcp.model.pretrained.write import write_folder

__all__ = ["FAMILIES", "Decoder", "ModelFolder", "Rows", "dense", "family_for", "qwen3_next", "write_folder"]
