"""What an attention variant is: named per-head tensors in, one output out; how it is parallelised is not its matter."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from mmcp.attention.pairs import Pairs
from mmcp.masks import Mask
from mmcp.registry import Registry
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import Ranges

ATTENTION = Registry("attention variant")
Derived = TypeVar("Derived")


@dataclass(frozen=True)
class HeadShare:
    """Which heads of a layer are present: all of them on one rank, some of them after an exchange.

    Four query heads over two key-value heads, ranks 0 and 1 of three (`split_heads(4, 2, 3)`):
        rank 0: query_heads = (0,),  kv_heads = (0,),   kv_of_query = (0,)
        rank 1: query_heads = (1,),  kv_heads = (0,),   kv_of_query = (0,)
        rank 2: query_heads = (2, 3), kv_heads = (1,),  kv_of_query = (0, 0)
    """

    query_heads: tuple[int, ...]
    """Numbers of the query heads, ascending and consecutive."""
    kv_heads: tuple[int, ...]
    """Numbers of the key-value heads that these query heads read, ascending."""

    kv_of_query: tuple[int, ...]
    """For each query head present, the index of its key-value head among those present."""


def split_heads(num_heads: int, num_kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    """Give rank j the query heads floor(j h / P) .. floor((j+1) h / P) and the key-value heads they read.

    A key-value head is present on every rank that holds one of its query heads.
    Raises ValueError when a rank would get no head or the key-value heads do not divide the query heads.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads are not a multiple of {num_kv_heads} key-value heads; "
            f"choose a divisor of {num_heads}"
        )
    if ranks > num_heads:
        raise ValueError(
            f"ulysses={ranks} ranks for {num_heads} query heads ({num_kv_heads} key-value heads): some rank would get "
            f"no head; use ulysses at most {num_heads} and put the other ranks on the ring axis, in a mode that "
            "crosses it"
        )
    group = num_heads // num_kv_heads
    shares = []
    for rank in range(ranks):
        query = tuple(range(rank * num_heads // ranks, (rank + 1) * num_heads // ranks))
        kv = tuple(range(query[0] // group, query[-1] // group + 1))
        shares.append(HeadShare(query, kv, tuple(head // group - kv[0] for head in query)))
    return tuple(shares)


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Heads of one layer and their size."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Key-value heads, a divisor."""
    head_dim: int


@dataclass(frozen=True)
class HeadTensor:
    """One tensor a variant takes: [s, heads, dim], with as many heads as `heads` says."""

    name: str
    heads: str
    """`query`: one per query head; `kv`: one per key-value head."""
    dim: int
    """Size of a head in this tensor; 1 for a gate."""
    halo: int = 0
    """Tokens before a run that `RecurrentAttention.prepare` reads."""


def qkv_tensors(head_dim: int) -> tuple[HeadTensor, ...]:
    """Return what plain attention takes: q per query head, k and v per key-value head."""
    return tuple(HeadTensor(name, heads, head_dim) for name, heads in (("q", "query"), ("k", "kv"), ("v", "kv")))


@dataclass(frozen=True, eq=False)
class RowInfo:
    """What every layer may know of a row: the same object for all layers of one forward."""

    mask: Mask
    """Which query may read which key, in global positions."""
    plan: ShardPlan
    """Who holds which token."""
    rank: int
    """This rank inside the plan."""
    memo: dict[Hashable, Any] = field(default_factory=dict)
    """What `once` has made."""

    def once(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """Return what `make` derives from plan and mask, made for the first layer that asks and kept for the next.

        key: names the consumer and all that the result depends on beside this row
        """
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


class Attention(nn.Module, ABC):
    """An attention variant on whole sequences: it sees every token of the row in order, and some of the heads."""

    tensors: tuple[HeadTensor, ...]
    """What `forward` takes, in the order in which it is exchanged between ranks."""
    out_dim: int
    """Size of a head of the output."""

    def check(self, mask: Mask) -> None:
        """Raise ValueError for a mask that this variant would ignore; by default none."""

    def check_type(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raise ValueError for a type of inputs that this variant cannot compute in on a device; by default none."""

    @abstractmethod
    def forward(self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare) -> Tensor:
        """Attend.

        inputs: one [s, heads present, dim] per entry of `tensors`, tokens in sequence order
        returns [s, query heads present, out_dim]
        """

    @abstractmethod
    def reference(self, inputs: dict[str, Tensor], mask: Mask, heads: HeadShare) -> Tensor:
        """Compute what `forward` must give, slowly and in float64: the specification."""


class SoftmaxAttention(Attention):
    """A variant of q, k and v whose answer is a weighted mean of values: answers to some keys merge by log-sum-exp."""

    @abstractmethod
    def visible(self, mask: Mask) -> Mask:
        """Narrow the row's mask to what this variant lets a query read."""

    @abstractmethod
    def partial(self, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, heads: HeadShare) -> tuple[Tensor, Tensor]:
        """Attend to the keys that are here, outside autograd.

        q: [sq, h, d]  k, v: [sk, k, d]   any tokens of the row, of the heads present; pairs count their rows
        returns out [sq, h, d], in the inputs' type or wider, and lse [sq, h], in float32 or wider; 0 and -inf where a
        query reads no key here
        """

    @abstractmethod
    def partial_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        pairs: Pairs,
        heads: HeadShare,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the share of these keys in the gradients of q, k and v, in the inputs' type or wider.

        grad, out: [sq, h, d], in the inputs' type  lse: [sq, h]   of the answer merged over all keys
        """

    @abstractmethod
    def decode(self, q: Tensor, k: Tensor, v: Tensor, readable: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend from one new token to kept keys, outside autograd.

        q: [h, d]  k, v: [k, n, d]   all heads of the layer
        readable: [n] bool  which keys count; None: all
        returns out [h, d] and lse [h], in float32 or the inputs' type, whichever is wider; 0 and -inf without a key
        """


class RecurrentAttention(Attention):
    """A variant that reads in order: a run of tokens changes the state by an affine map.

        state after = transition * state before + state

    A run is a contiguous range of the row's tokens, given as global positions; the tensors of several runs stand one
    after the other. Where a document begins inside a run, also at its first token, its transition is 0 and its state
    is that of its last document. States and transitions are in float32 or the inputs' type, whichever is wider, and
    carry gradients. `summarise` and `finish` take what `prepare` gives.
    """

    state_dim: tuple[int, int]
    """Size of the state of one query head, (d_k, d_v)."""
    transition_dim: tuple[int, ...]
    """Size of the transition of one query head: () scales the state, (d_k, d_k) multiplies it from the left."""

    def check(self, mask: Mask) -> None:
        """Raise ValueError for tokens that attend both ways: a state is read in order."""
        if len(mask.blocks):
            start, stop = mask.blocks[0].tolist()
            raise ValueError(
                f"linear attention reads in order, but tokens {start} to {stop - 1} attend both ways; let all segments "
                "attend 'causal', or use softmax in every layer"
            )

    def prepare(
        self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, runs: Ranges, halo: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Mix what is read of neighbouring tokens, once, before `summarise` and `finish`; by default nothing.

        inputs: one [n, heads present, dim] per entry of `tensors`, the tokens of all runs
        halo: one [runs, halo, heads present, dim] per entry, the tokens before each run, with gradients; of no effect
            where they lie before the row or in another document
        """
        return inputs

    @abstractmethod
    def summarise(
        self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, runs: Ranges
    ) -> tuple[Tensor, Tensor]:
        """Tell what each run does to the state.

        inputs: what `prepare` gave for the tokens of all runs
        returns transition [runs, h, *transition_dim] and state [runs, h, d_k, d_v]
        """

    @abstractmethod
    def finish(
        self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, runs: Ranges, states: Tensor
    ) -> Tensor:
        """Attend, given the state before each run.

        states: [runs, h, d_k, d_v]  of no effect on a run that begins a document
        returns [n, query heads present, out_dim]
        """

    @abstractmethod
    def decode(
        self, inputs: dict[str, Tensor], halo: dict[str, Tensor], states: Tensor, heads: HeadShare
    ) -> tuple[Tensor, Tensor]:
        """Read one more token of each of n documents, outside autograd.

        inputs: one [n, heads present, dim] per entry of `tensors`
        halo: one [n, halo, heads present, dim] per entry, the tokens before these, 0 before their document
        states: [n, h, d_k, d_v]  after the tokens before
        returns [n, query heads present, out_dim] and the states after, [n, h, d_k, d_v]
        """

    def forward(self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare) -> Tensor:
        """Attend to the whole row, as one run."""
        self.check(info.mask)
        first, s = inputs[self.tensors[0].name], info.mask.num_tokens
        assert len(first) == s, f"{len(first)} tokens in a row of {s}"
        runs = ((0, s),) if s else ()
        halo = {
            spec.name: first.new_zeros((len(runs), spec.halo, *inputs[spec.name].shape[1:])) for spec in self.tensors
        }
        states = first.new_zeros(
            (len(runs), len(heads.query_heads), *self.state_dim), dtype=torch.promote_types(first.dtype, torch.float32)
        )
        return self.finish(self.prepare(inputs, info, heads, runs, halo), info, heads, runs, states)


def carry(transition: Tensor, state: Tensor) -> Tensor:
    """Apply transitions [..., h] or [..., h, d_k, d_k] to states [..., h, d_k, d_v]."""
    return transition @ state if transition.ndim == state.ndim else transition[..., None, None] * state


def transposed(transition: Tensor, state: Tensor) -> Tensor:
    """Return the transitions by which `carry` takes gradients of these states back."""
    return transition.mT if transition.ndim == state.ndim else transition


def transition_gradient(transition: Tensor, before: Tensor, grad_after: Tensor) -> Tensor:
    """Return the gradient of transitions [runs, h] or [runs, h, d_k, d_k] in carry(transition, before).

    before: states they were applied to  grad_after: gradients of the states that came of it, [runs, h, d_k, d_v] each
    """
    return grad_after @ before.mT if transition.ndim == before.ndim else (grad_after * before).sum((-2, -1))


class LocalAttention(nn.Module):
    """All heads of a layer on one rank: the call that a parallel wrapper answers too."""

    def __init__(self, core: Attention, heads: HeadShare, *, mode: str = "ulysses", chunks: int = 1):
        super().__init__()
        self.core, self.heads = core, heads
        self.mode, self.chunks = mode, chunks

    def forward(self, inputs: dict[str, Tensor], info: RowInfo) -> Tensor:
        """Attend: one [s, heads, dim] per entry of the core's `tensors` -> [s, h, out_dim]."""
        return self.core(inputs, info, self.heads)


def check_chunks(mode: str, chunks: int) -> None:
    """Raise ValueError for a number of head groups that means nothing in this mode."""
    if chunks < 1:
        raise ValueError(f"chunks={chunks} groups of heads; use 1 to exchange all heads at once")
    if chunks > 1 and mode != "ulysses":
        raise ValueError(f"chunks={chunks} groups of heads in mode '{mode}': only 'ulysses' exchanges in groups; use 1")


class Variant:
    """What the config of an attention variant answers: a base whose answers a config replaces where it differs.

    Register the config with `@ATTENTION.register(name)`. It must have `name` and `build`, and one of the two costs;
    its own fields may take the place of answers (`rotary`, `output_gate`, `mode`, `chunks`).
    """

    @property
    def name(self) -> str:
        """The name it is registered by."""
        raise NotImplementedError

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are turned by their positions before the core sees them."""
        return True

    @property
    def qk_norm(self) -> bool:
        """Whether the layer may norm queries and keys per head, where the backbone asks for it."""
        return True

    @property
    def output_gate(self) -> bool:
        """Whether the layer multiplies the output by a gate, activation(projection(x))."""
        return False

    @property
    def gate_activation(self) -> Literal["sigmoid", "silu"]:
        """What the projection passes through to be that gate."""
        return "sigmoid"

    @property
    def mode(self) -> str:
        """How the layer works over several ranks: a name in mmcp.parallel.modes; the field lists the possible ones."""
        return "ulysses"

    @property
    def chunks(self) -> int:
        """Mode `ulysses`: groups of heads whose exchange runs under the attention of another group."""
        return 1

    @property
    def layout(self) -> Literal["any", "contiguous"]:
        """Tokens a rank may hold when the sequence stays split; under Ulysses any layout will do."""
        return "any"

    def shape(self, backbone: HeadShape) -> HeadShape:
        """Say which heads a layer has, given those of the backbone."""
        return backbone

    def build(self, *, heads: int, kv_heads: int, head_dim: int) -> Attention:
        """Make the core of a layer with `heads` query heads and `kv_heads` key-value heads in all."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """Tokens a query sees looking back, itself included; 0: all of its document."""
        return 0

    @property
    def sink(self) -> int:
        """First tokens of a document that stay visible beyond the window."""
        return 0

    def pair_flops(self, head_dim: int) -> int:
        """Forward FLOPs of one query head for one visible (query, key) pair."""
        return 0

    def token_flops(self, head_dim: int) -> int:
        """Forward FLOPs of one query head per token, whatever it sees."""
        return 0

    def flops(self, mask: Mask, *, heads: int, head_dim: int) -> int:
        """Count the forward FLOPs of `heads` query heads on one row."""
        each = self.pair_flops(head_dim) * mask.pairs() + self.token_flops(head_dim) * mask.num_tokens
        return each * heads

    def state_bytes(self, *, heads: int, head_dim: int) -> int:
        """Bytes of state that a run of tokens hands on to the next; 0 where there is none."""
        return 0


class RecurrentVariant(Variant):
    """What the config of a variant answers whose core is a `RecurrentAttention` in chunks; it has a field `chunk`."""

    chunk: int
    """Tokens that are multiplied at once."""

    @property
    def layout(self) -> Literal["any", "contiguous"]:
        """Tokens a rank may hold when the sequence stays split: state is passed along ranges in order."""
        return "contiguous"

    def check_sizes(self) -> None:
        """Raise ValueError for a number of tokens in a chunk, or of head groups, that means nothing."""
        if self.chunk < 1:
            raise ValueError(f"chunk={self.chunk} tokens; use at least 1, 64 is a good size")
        check_chunks(self.mode, self.chunks)
