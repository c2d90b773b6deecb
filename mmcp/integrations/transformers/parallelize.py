"""Make a transformers model run over context-parallel ranks: `model = parallelize(model, mesh)`.

The model's own forward runs on each rank, with this rank's tokens, positions and encoder rows. What its layers know of
the whole row passes through it as an argument; what it knows of pixels is encoded where the plan says and routed to the
tokens. Its loss is the sum of all token losses over the labelled tokens, whatever the split.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmcp.integrations.transformers.check import check_batch, check_model, check_ranks_agree, check_unchanged
from mmcp.integrations.transformers.costs import cost_model
from mmcp.integrations.transformers.gated_delta import parallelize_layer
from mmcp.integrations.transformers.generation import NextLogits, enable_generation
from mmcp.integrations.transformers.interfaces import NAME, no_mask, register
from mmcp.integrations.transformers.local_row import Attentions, LocalRow, row_infos
from mmcp.integrations.transformers.outputs import ParallelOutput, scored_output
from mmcp.integrations.transformers.sharded_cache import ShardedCache, check_prompts, prompts_alone
from mmcp.integrations.transformers.towers import TOWERS, DeferredPixels, MediaUnit, Tower
from mmcp.integrations.transformers.turns import Turns
from mmcp.integrations.transformers.whole_row import WholeRow, read_batch
from mmcp.parallel.cached_attention import RowCache
from mmcp.parallel.collectives import agree
from mmcp.parallel.last_tokens import last_tokens
from mmcp.parallel.mesh import Mesh
from mmcp.parallel.route import Router
from mmcp.sharding.cost import row_costs
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import as_indices
from mmcp.sharding.strategies import STRATEGIES

Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    mesh: Mesh,
    *,
    strategy: str = "balanced",
    mode: Literal["ulysses", "ring", "allgather"] | None = None,
    gradients: Literal["mean", "sum"] = "mean",
) -> Model:
    """Let `model` answer whole batches over the ranks of `mesh.cp`; returns the same model.

    Afterwards `model(**batch).loss` takes the batch that one process would take, the same on all ranks of a
    context-parallel group, and its value is the loss of that batch on all of them.

    model: a model of transformers, or peft's around one, whose inner model is changed
    strategy: name of the sharding strategy
    mode: how attention crosses the ring axis; None: `ulysses` on a mesh without one, `ring` with one
    gradients: whether parameters' gradients are averaged over all ranks afterwards, as DDP, FSDP, accelerate and
        Trainer do, or summed, as mmcp.parallel.apply.shard_parameters does
    Raises ValueError for a model that needs what cannot be split, by name.
    """
    if mode is None:
        mode = "ulysses" if mesh.ring.size == 1 else "ring"
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    check_model(inner, mesh)
    register()
    text = inner.get_decoder()
    text.set_attn_implementation(NAME)
    linear = [hasattr(layer, "linear_attn") for layer in text.layers]
    for layer in text.layers:
        if hasattr(layer, "linear_attn"):
            parallelize_layer(layer.linear_attn, mesh)
    turns = enable_generation(inner, mesh)
    parallel = ParallelForward(inner, mesh, Attentions(mesh, mode), linear, strategy, gradients, turns)
    inner.forward = MethodType(_as_method(inner, parallel), inner)
    return model


def _as_method(model: PreTrainedModel, parallel: "ParallelForward") -> Callable:
    """Dress the parallel forward in the signature of the model's own, which trainers look at."""
    signature = inspect.signature(type(model).forward)

    @wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> ParallelOutput | NextLogits | tuple[Tensor, ...]:
        if self is not parallel.model:
            raise ValueError(
                f"this {type(self).__name__} is a copy of a parallelised model and would answer with the weights of "
                "the other; copy it first, then parallelize each"
            )
        bound = signature.bind(self, *args, **kwargs).arguments
        named = {name: value for name, value in bound.items() if name != "self"}
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(name, {})
        out = parallel({name: value for name, value in named.items() if value is not None})
        return out.to_tuple() if named.get("return_dict") is False else out

    return forward


class ParallelForward:
    """A model's forward over ranks."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        attentions: Attentions,
        linear: list[bool],
        strategy: str,
        gradients: str,
        turns: Turns,
    ):
        self.model, self.mesh, self.attentions, self.linear, self.turns = model, mesh, attentions, linear, turns
        self.plan_row = STRATEGIES[strategy]
        self.costs = cost_model(model.config, linear, mesh.device.type)
        self.weight = mesh.cp.size if gradients == "mean" else 1
        model_type = model.config.model_type
        self.tower: Tower | None = TOWERS[model_type](model) if model_type in TOWERS else None

    @torch.compiler.disable  # planning and exchanges cannot be traced, and every batch has another plan
    def __call__(self, batch: dict[str, Any]) -> ParallelOutput | NextLogits:
        """Answer a batch that all ranks of the group were given.

        batch: what the model's own forward takes, without the entries that are None
        Raises ValueError for what is refused, and PeerError on the ranks whose own batch was fine.
        """
        cache = batch.get("cache")
        if isinstance(cache, ShardedCache):
            with self.turns.reading(batch["input_ids"]):
                return self._read_new(batch, cache) if cache.num_columns else self._read_prompts(batch, cache)
        batch, whole, plan = self._read(batch)
        row, router = self._row(whole, plan), Router(plan, self.mesh.cp, device=batch["input_ids"].device)
        route = partial(router.to_scorers, trainable=torch.is_grad_enabled())
        logits = self._run(batch, whole, row, router, route)
        return scored_output(logits, batch, whole, plan, group=self.mesh.cp, weight=self.weight)

    def _read_prompts(self, batch: dict[str, Any], cache: ShardedCache) -> NextLogits:
        """Read a batch of prompts, keep what new tokens will read of it in `cache`, and tell what follows."""
        batch, whole, plan = self._read(batch, is_prompt=True)
        row, router = self._row(whole, plan, cache.row), Router(plan, self.mesh.cp, device=batch["input_ids"].device)
        cache.begin(whole.masks[0], whole.positions, batch["input_ids"].shape[1])
        route = partial(last_tokens, info=row.infos[0], group=self.mesh.cp)
        return NextLogits(logits=self._run(batch, whole, row, router, route)[:, None], cache=cache)

    def _read_new(self, batch: dict[str, Any], cache: ShardedCache) -> NextLogits:
        """Read one new token of each row of the batch, and tell what follows."""
        ids = batch["input_ids"]
        info, positions = cache.read(ids)
        row = LocalRow(info.plan, (info,) * len(self.linear), self.attentions, info.rank, cache.row)
        logits = type(self.model).forward(self.model, **_inputs(ids[:, 0], positions, row)).logits[0]
        return NextLogits(logits=logits[:, None], cache=cache)

    def _row(self, whole: WholeRow, plan: ShardPlan, cache: RowCache | None = None) -> LocalRow:
        rank = self.mesh.cp.index
        return LocalRow(plan, row_infos(list(whole.masks), plan, rank), self.attentions, rank, cache)

    def _run(
        self,
        batch: dict[str, Any],
        whole: WholeRow,
        row: LocalRow,
        router: Router,
        route: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Run the model on this rank's tokens: logits of the rows that `route` brings to its head, [l, vocabulary]."""
        device = batch["input_ids"].device
        held = row.plan.positions(row.rank)
        ids, positions = whole.ids[held], whole.positions[:, held]
        if not len(held):
            ids, positions = np.zeros(1, np.int64), np.zeros((len(positions), 1), np.int64)
        inputs = _inputs(torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device), row)
        rows = self._media_rows(batch, whole, row.plan, router)
        if self.tower is not None and rows is not None:
            kinds = frozenset(unit.kind for unit in whole.units)
            inputs["mm_encoder_outputs"] = self.tower.outputs(rows, torch.from_numpy(whole.ids[held]).to(device), kinds)
        with _routed_head(self.model.get_output_embeddings(), row, route):
            logits = type(self.model).forward(self.model, **inputs).logits[0]
        if rows is not None and not whole.units:
            logits = logits + rows.sum()  # of no rows: the tower stays in the graph, as DDP needs
        return logits

    def plan(self, whole: WholeRow) -> ShardPlan:
        """Plan a row over the context-parallel ranks."""
        mesh = self.mesh.ring.size, self.mesh.ulysses.size
        return self.plan_row(whole.sequence, mesh, row_costs(whole.sequence, self.costs))

    def _read(self, batch: dict[str, Any], *, is_prompt: bool = False) -> tuple[dict[str, Any], WholeRow, ShardPlan]:
        """Check, read and plan a batch; whatever fails on one rank is raised on all of the group."""
        error: Exception | None = None
        try:
            check_unchanged(self.model)
            if is_prompt:
                batch = prompts_alone(batch, has_tower=self.tower is not None)
            batch = check_batch(self.model, batch, is_scored=not is_prompt)
            whole = read_batch(self.model, batch, self.tower, self.linear)
            if is_prompt:
                check_prompts(whole, batch["input_ids"])
            plan = self.plan(whole)
        except Exception as found:
            error = found
        agree(error, group=self.mesh.cp, timeout=None)
        check_ranks_agree(batch, whole, plan, self.mesh.cp)
        return batch, whole, plan

    def _media_rows(self, batch: dict[str, Any], whole: WholeRow, plan: ShardPlan, router: Router) -> Tensor | None:
        """Encode this rank's units and send their rows: [m, columns] of the media tokens held here; None without tower.

        Raises what a load of deferred pixels raises, and PeerError on the other ranks.
        """
        if self.tower is None:
            return None
        mine = [unit for _, ranges in plan.calls[self.mesh.cp.index] for unit in as_indices(ranges)]
        units = [whole.units[unit] for unit in mine]
        rows = self.tower.encode(self._pixels(batch, units), units)
        return router.to_owners(rows, trainable=torch.is_grad_enabled())

    def _pixels(self, batch: dict[str, Any], units: list[MediaUnit]) -> Tensor:
        assert self.tower is not None
        if not any(isinstance(value, DeferredPixels) for value in batch.values()):
            return self.tower.pixels(batch, units)
        error: Exception | None = None
        try:
            pixels = self.tower.pixels(batch, units)
        except Exception as found:
            error = found
        agree(error, group=self.mesh.cp, timeout=None)
        return pixels


def _inputs(ids: Tensor, positions: Tensor, row: LocalRow) -> dict[str, Any]:
    """Make the arguments of the model's own forward. ids: [n] int64  positions: [axes, n]."""
    return {
        "input_ids": ids[None],
        "position_ids": positions if len(positions) == 1 else positions[:, None],
        "attention_mask": no_mask(),
        "mmcp_row": row,
        "use_cache": False,
        "return_dict": True,
    }


@contextmanager
def _routed_head(head: nn.Module, row: LocalRow, route: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Send the rows that reach the output head, [s/cp, e], where `route` brings them."""

    def send(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (route(row.without_ghost(args[0][0]))[None],)

    handle = head.register_forward_pre_hook(send)
    try:
        yield
    finally:
        handle.remove()
