"""What the layers of one rank keep for backward, in bytes, by layer part: each stored tensor once.

One place for every formula: who changes what a layer keeps changes it here. Per token, with e bytes of a number of the
computation, w = max(e, 4), width E, hidden size F, h query and k key-value heads of size d, n tokens of this rank and
g tokens that it attends from after trading heads (n without):

    norms          2 n (E e + w)            input and scale of each of the two
    projections    n E e                    what all of them read
    qk_norm        n (h + k) (d e + w)      input and scale, where queries and keys are normed
    attention      by variant, see KEPT     its inputs, output and log-sum-exp or states, of the heads here
    output         n h d e                  what the output projection reads, where attention has not kept it
    gate           n h d e x 2 or 3         what multiplies it (sigmoid: once, silu: twice) and the product
    mlp            n E e                    its input: the rest is made again, a few tokens at a time
                   4 n F e more             with biases

Rotary tables are shared by all layers, weights are counted elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mmcp.attention import AttentionConfig, GatedDeltaConfig, KernelisedConfig, LinearConfig
from mmcp.attention.base import HeadShare, split_heads
from mmcp.attention.chunks import GROUP_TOKENS
from mmcp.parallel.head_groups import head_groups
from mmcp.parallel.modes import MODES
from mmcp.planning.architecture import Architecture
from mmcp.planning.share import RankShare, heads_of
from mmcp.registry import Registry

KEPT = Registry("bytes that an attention variant keeps")
"""Name of a variant -> (layer) -> bytes kept, inputs included, and whether the output is among them."""

Formula = Callable[["AttentionPlace"], tuple[int, bool]]


@dataclass(frozen=True, eq=False)
class AttentionPlace:
    """One attention layer as one rank sees it."""

    variant: AttentionConfig
    share: RankShare
    all_heads: tuple[int, int]
    """Query and key-value heads of the layer."""
    heads: HeadShare
    """Those of this rank."""
    head_dim: int
    element: int
    """Bytes of a number of the computation."""

    @property
    def wide(self) -> int:
        """Bytes of a number of partial results."""
        return max(self.element, 4)

    @property
    def is_flat(self) -> bool:
        return MODES[self.variant.mode].is_flat

    @property
    def trades(self) -> bool:
        """Whether heads are traded for tokens."""
        return (self.share.cp if self.is_flat else self.share.ulysses) > 1

    @property
    def crosses(self) -> bool:
        """Whether something goes from one ulysses group to another."""
        return self.share.ring > 1 and not self.is_flat

    @property
    def runs(self) -> tuple[int, ...]:
        """Lengths of the runs of tokens that it attends from."""
        return (self.share.row_tokens,) if self.is_flat or self.share.ring == 1 else self.share.runs

    @property
    def tokens(self) -> int:
        """Tokens that it attends from, g."""
        return sum(self.runs)

    @property
    def query(self) -> int:
        return len(self.heads.query_heads)

    @property
    def kv(self) -> int:
        return len(self.heads.kv_heads)

    def states(self, chunk: int, numbers: int) -> int:
        """Bytes of the states, of `numbers` each, before each group of chunks."""
        step = max(1, GROUP_TOKENS // chunk) * chunk
        return sum(-(-run // step) for run in self.runs) * self.query * numbers * self.wide

    def passed(self, transition: int, state: int) -> int:
        """Bytes of what runs do to the state, all of them gathered or only this rank's, and of the states before these.

        A matrix stands in one tensor with the state that it was computed with.
        """
        if not self.crosses:
            return 0
        own = len(self.runs)
        gathered = self.share.row_runs * (transition + state)
        scanned = own * (transition + (state if transition > 1 else 0))
        numbers = (scanned if self.variant.mode == "scan" else gathered) + own * state
        return numbers * self.query * self.wide


def place_of(architecture: Architecture, variant: AttentionConfig, share: RankShare, element: int) -> AttentionPlace:
    """Place a layer on a rank. Raises ValueError when some rank would get no head, or too few for its chunks."""
    shape = architecture.backbone.shape(variant)
    mode = MODES[variant.mode]
    heads = heads_of(share, mode, heads=shape.heads, kv_heads=shape.kv_heads)
    if variant.chunks > 1:
        head_groups(split_heads(shape.heads, shape.kv_heads, share.cp), variant.chunks)
    return AttentionPlace(variant, share, (shape.heads, shape.kv_heads), heads, shape.head_dim, element)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that one block keeps, by part."""

    norms: int
    projections: int
    qk_norm: int
    attention: int
    output: int
    gate: int
    mlp: int

    @property
    def tokenwise(self) -> int:
        """All but attention."""
        return self.norms + self.projections + self.qk_norm + self.output + self.gate + self.mlp

    @property
    def total(self) -> int:
        return self.tokenwise + self.attention


def kept_by_block(architecture: Architecture, place: AttentionPlace) -> Kept:
    """Say what one block keeps without checkpointing."""
    settings, variant, e = architecture.backbone, place.variant, place.element
    (heads, kv_heads), n = place.all_heads, place.share.tokens
    row, head_rows = n * settings.width * e, n * heads * place.head_dim * e
    formula: Formula = KEPT[variant.name]
    attention, has_output = formula(place)
    has_norm = settings.qk_norm and variant.qk_norm
    gate = {"sigmoid": 2, "silu": 3}[variant.gate_activation] * head_rows if variant.output_gate else 0
    return Kept(
        norms=2 * (row + n * place.wide),
        projections=row,
        qk_norm=n * (heads + kv_heads) * (place.head_dim * e + place.wide) if has_norm else 0,
        attention=attention,
        output=0 if has_output and not place.trades else head_rows,
        gate=gate,
        mlp=row + mlp_kept(architecture, n, e),
    )


def mlp_kept(architecture: Architecture, tokens: int, element: int) -> int:
    """Bytes that the MLP of one block keeps of some tokens, beside its input: nothing where there is but one.

    With biases it keeps the maps' results, the gate's activation and their product.
    With experts each token's row is copied to every expert it takes and back, and the router's choice is kept.
    """
    if not architecture.experts:
        settings = architecture.backbone
        return 4 * tokens * settings.mlp_width * element if settings.mlp_bias else 0
    return tokens * (
        2 * architecture.mlps * architecture.backbone.width * element + architecture.experts * max(element, 4)
    )


@KEPT.register("softmax")
def _softmax(place: AttentionPlace) -> tuple[int, bool]:
    """q, k, v and the output; the logarithm of sums."""
    d, e = place.head_dim, place.element
    rows = (2 * place.query + 2 * place.kv) * d * e + place.query * place.wide
    return place.tokens * (rows + _joined_kv(place) * 2 * d * e), True


@KEPT.register("linear")
def _linear(place: AttentionPlace) -> tuple[int, bool]:
    """q, k, v; their features; states; the output before its norm."""
    assert isinstance(place.variant, LinearConfig)
    d, e, w = place.head_dim, place.element, place.wide
    rows = (place.query + 2 * place.kv) * d * e + place.query * d * w
    if place.variant.feature_map != "identity":
        rows += (place.query + (2 if place.crosses else 1) * place.kv) * d * e
    states = place.states(place.variant.chunk, d * d) + place.passed(1, d * d)
    return place.tokens * (rows + _joined_kv(place) * 2 * d * e) + states, False


@KEPT.register("kernelised")
def _kernelised(place: AttentionPlace) -> tuple[int, bool]:
    """q, k (v with them where they came in one message); features, values with a 1; states; sums with normaliser."""
    assert isinstance(place.variant, KernelisedConfig)
    d, e, w, times = place.head_dim, place.element, place.wide, 2 if place.crosses else 1
    raw = place.query + (2 if place.trades else 1) * place.kv
    rows = raw * d * e + (place.query + times * place.kv) * d * w + times * place.kv * (d + 1) * e
    rows += place.query * (d + 1) * w
    states = place.states(place.variant.chunk, d * (d + 1)) + place.passed(1, d * (d + 1))
    return place.tokens * (rows + _joined_kv(place) * 2 * d * e) + states, False


@KEPT.register("gated_delta")
def _gated_delta(place: AttentionPlace) -> tuple[int, bool]:
    """q, k, v before and after the convolution; the gates; states; the output before its norm."""
    assert isinstance(place.variant, GatedDeltaConfig)
    d, e, w = place.head_dim, place.element, place.wide
    rows = 2 * (2 * place.kv + place.query) * d * e + place.query * (4 + d) * w
    rows += 2 * place.query * e if place.trades else 0
    states = place.states(place.variant.chunk, d * d) + place.passed(d * d, d * d)
    if place.crosses:
        rows += 2 * place.query * d * e
        states += place.states(place.variant.chunk, 2 * d * d)
    return place.tokens * (rows + _joined_kv(place) * 2 * d * e) + states, False


def _joined_kv(place: AttentionPlace) -> int:
    """Key-value heads that are copied because two groups of heads read one of them (see mmcp.parallel.head_groups)."""
    if place.variant.chunks == 1 or not place.trades:
        return 0
    ranks, index = place.share.cp, place.share.ring_index * place.share.ulysses + place.share.ulysses_index
    copied = 0
    for group in head_groups(split_heads(*place.all_heads, ranks), place.variant.chunks):
        present = len(group.shares[index].kv_heads)
        new = group.new_kv[index][1] - group.new_kv[index][0]
        copied += present if 0 < new < present else 0
    return copied
