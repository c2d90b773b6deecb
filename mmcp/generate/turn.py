"""After each token the ranks agree on it, on who goes on, and on whether some rank has failed."""

import torch

from mmcp.parallel.collectives import agree, all_reduce
from mmcp.parallel.mesh import Mesh


def agree_on_ids(ids: list[int], error: Exception | None, *, mesh: Mesh, device: torch.device) -> list[int]:
    """Return the ids that the first rank of the group chose; one small all-reduce in the group, one across groups.

    ids: one for each document, as many on all ranks of a context-parallel group; ignored where there is an error
    Raises on all ranks when any rank of the run brings an error: its own there, PeerError elsewhere.
    """
    count = len(ids)
    mine = ids if mesh.cp.index == 0 and error is None else [-1] * count
    words = torch.tensor([*mine, int(error is not None)], dtype=torch.int64, device=device)
    *agreed, has_failed = all_reduce(words, "max", group=mesh.cp, name="new ids").tolist()
    flag = torch.tensor(has_failed, device=device)
    if bool(all_reduce(flag, "max", group=mesh.data, name="new ids")):
        agree(error, group=mesh.world)
    return agreed


def any_goes_on(goes_on: bool, *, mesh: Mesh, device: torch.device) -> bool:
    """Tell whether any data-parallel group has a document left; sharded parameters are gathered by all in each step."""
    flag = torch.tensor(int(goes_on), device=device)
    return bool(all_reduce(flag, "max", group=mesh.data, name="goes on"))
