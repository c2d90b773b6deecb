"""What every job shares: the config of a run, and the model and plans that it describes."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from data_pipelines.clip import ClipConfig
from data_pipelines.feature_cache import FeatureCacheConfig
from data_pipelines.mixture import DataSource, Mixture
from encoders import ENCODERS, AudioWindows, Encoder, ImagePatches, TokenizerConfig, VideoPatches
from mmcp.attention import AttentionConfig
from mmcp.config import OneOf, config
from mmcp.model.adapters import LoraConfig
from mmcp.model.backbone import BackboneConfig
from mmcp.model.pretrained import Decoder, ModelFolder
from mmcp.model.vlm import VideoLM
from mmcp.parallel.mesh import MeshConfig
from mmcp.sequence import TokenSequence
from mmcp.sharding.cost import DEFAULT_RATES, CostModel, LayerCost, Rates, row_costs
from mmcp.sharding.needs import layer_needs
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.step import StepPlan, plan_step
from mmcp.sharding.strategies import STRATEGIES
from mmcp.training.optim import OptimConfig
from mmcp.training.parts import PartsConfig
from mmcp.training.train import TrainConfig

EVERYTHING = PartsConfig()


def default_rates() -> Rates:
    """Return the rates of a run that gives none: those of this machine's kind of device."""
    return DEFAULT_RATES["cuda" if torch.cuda.is_available() else "cpu"]


@config
class ModelConfig:
    """Encoders and backbone.

    With `pretrained`, the folder's config.json says what the backbone, its vocabulary and its head are; what is given
    beside it wins, field by field. All settings, and so the run's config.yaml, have the rest written out.
    """

    pretrained: str = ""
    """Folder of a model of transformers whose weights embedding, backbone and head start from; empty: new weights."""
    backbone: BackboneConfig = cast(BackboneConfig, None)  # required unless `pretrained` says it
    vocabulary: NonNegativeInt = 0
    """Rows of the embedding and of the head; 0: as many as the tokenizer has ids."""
    tied_head: bool = False
    """Score labels by the weights that embed text."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters of the backbone."""
    image: Annotated[Any, OneOf(ENCODERS)] = ImagePatches()
    video: Annotated[Any, OneOf(ENCODERS)] = VideoPatches()
    audio: Annotated[Any, OneOf(ENCODERS)] = AudioWindows()

    def __post_init__(self):
        if self.backbone is None:
            if not self.pretrained:
                raise ValueError("backbone is missing; describe it, or name a model folder in model.pretrained")
            decoder = ModelFolder.open(self.pretrained).decoder
            object.__setattr__(self, "backbone", decoder.backbone)
            object.__setattr__(self, "vocabulary", decoder.vocabulary)
            object.__setattr__(self, "tied_head", decoder.tied_head)
        for kind, encoder in self.encoders.items():
            if encoder.kind != kind:
                raise ValueError(f"{kind}: encoder '{encoder.name}' encodes {encoder.kind}; choose one for {kind}")

    @classmethod
    def defaults_for(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return what a model folder says where a file says nothing. Raises ValueError for a folder that is none."""
        if not isinstance(given.get("pretrained"), str) or not given["pretrained"]:
            return {}
        decoder = ModelFolder.open(given["pretrained"]).decoder
        return {"backbone": decoder.backbone, "vocabulary": decoder.vocabulary, "tied_head": decoder.tied_head}

    @property
    def encoders(self) -> dict[str, Encoder]:
        """By segment kind."""
        return {"audio": self.audio, "image": self.image, "video": self.video}

    def decoder(self, ids: int) -> Decoder:
        """Return the text model, for a tokenizer of so many ids. Raises ValueError when there are more than rows."""
        if self.vocabulary and ids > self.vocabulary:
            raise ValueError(
                f"the tokenizer has {ids} ids, the model {self.vocabulary} rows (model.vocabulary); use the "
                "tokenizer.json of the model's folder"
            )
        return Decoder(backbone=self.backbone, vocabulary=self.vocabulary or ids, tied_head=self.tied_head)


@config
class ShardingConfig:
    """How a row is split over the ranks of a group."""

    strategy: str = "balanced"
    """Name of a registered sharding strategy."""
    call_tokens: PositiveInt = 4096
    """Most rows that one encoder call makes (one unit at least)."""
    cap_bytes: NonNegativeInt = 0
    """Most resident bytes of a row on one rank, media and activations; 0: any number."""

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            known = ", ".join(sorted(STRATEGIES))
            raise ValueError(f"sharding strategy '{self.strategy}' is unknown; use one of {known}")


@config
class DataConfig:
    """Where samples come from and how they are joined."""

    train: str | tuple[DataSource, ...]
    """Shards to train on: a folder of `mmcp prepare`, a file, a pattern such as shard-{000..009}.tar, or a list of
    {path, weight} to be mixed."""
    held_out: str = ""
    """Shards to evaluate on; empty: none."""
    held_out_samples: PositiveInt = 64
    """Most samples whose mean loss is measured during training, evenly spaced over the held-out shards."""
    documents_per_step: PositiveInt = 8
    """Samples of one optimizer step, over all ranks."""
    row_tokens: PositiveInt = 4096
    """Most tokens of one packed row; a step has as many rows, and so micro-batches, as its samples need."""
    workers: PositiveInt = 1
    """Decode workers of each rank."""
    prefetch: PositiveInt = 2
    """Steps decoded ahead."""
    lookahead: NonNegativeInt = 16
    """Further steps planned ahead: samples of theirs that take long to decode are started early."""
    prefetch_mb: PositiveInt = 2048
    """Most decoded MiB that wait on a rank; what the next step needs is always decoded."""
    dead_worker: Literal["replace", "stop"] = "replace"
    """What follows when a decode worker dies: its sample counts as unreadable and another worker takes its place, or
    the run stops on all ranks and names the sample."""
    backend: Literal["pyav", "decord"] = "pyav"
    """Reads the pictures of videos; decord only where a clip's index proves that it gives the right frames."""
    deadline_s: PositiveFloat = 120.0
    """Seconds a decode job may take before its worker is killed and its sample counts as unreadable."""

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """What is trained on, as a list."""
        return (DataSource(path=self.train),) if isinstance(self.train, str) else self.train

    def open_train(self, *, strict: bool = False) -> Mixture:
        """Index what is trained on. Raises ValueError."""
        return Mixture.open(self.sources, strict=strict)


@config
class RunConfig:
    """Everything that decides a run."""

    folder: str
    """Where the run is written."""
    start_from: str = ""
    """Folder of a finished run whose last weights this one starts from: the stage before; empty: none."""
    seed: NonNegativeInt = 0
    """Of new weights and of the order of samples."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the computation; bfloat16 keeps float32 parameters and sums."""
    mesh: MeshConfig = MeshConfig()
    sharding: ShardingConfig = ShardingConfig()
    rates: Rates = field(default_factory=default_rates)
    """Speeds that plans are priced with, those of the device unless given; `mmcp bench calibrate` measures them."""
    data: DataConfig
    clip: ClipConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig
    optim: OptimConfig = OptimConfig()
    parts: PartsConfig = PartsConfig()
    """Which parts of the model train, and how fast."""
    train: TrainConfig = TrainConfig()
    features: FeatureCacheConfig = FeatureCacheConfig()
    """Where features of frozen encoders are kept, so that a clip is decoded and encoded once."""

    def __post_init__(self):
        if self.features.folder and not self.parts.frozen_encoders:
            raise ValueError(
                f"features.folder='{self.features.folder}' keeps features of frozen encoders, and none is frozen; "
                "set parts.video, parts.image or parts.audio to 0, or leave it empty"
            )
        if self.clip.budget.tokens > self.data.row_tokens:
            raise ValueError(
                f"clip.budget.tokens={self.clip.budget.tokens} lets a sample be longer than "
                f"data.row_tokens={self.data.row_tokens}; lower the one or raise the other"
            )
        if self.train.evaluate_every and not self.data.held_out:
            raise ValueError(f"train.evaluate_every={self.train.evaluate_every} needs data.held_out; name shards there")

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Type of the parameters: bfloat16 is a type of computation only."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Type that FSDP2 casts parameters to; None: as they are."""
        return torch.bfloat16 if self.dtype == "bfloat16" else None

    def with_pattern(self, pattern: tuple[AttentionConfig, ...]) -> "RunConfig":
        """Return the config with other attention in its layers."""
        backbone = replace(self.model.backbone, pattern=pattern)
        return replace(self, model=replace(self.model, backbone=backbone))

    def planner(self, vocabulary: int) -> "Planner":
        """Make the planner of this run."""
        costs = cost_model(
            self.model,
            parts=self.parts,
            vocabulary=self.model.decoder(vocabulary).vocabulary,
            dtype=self.compute_dtype or self.parameter_dtype,
            call_tokens=self.sharding.call_tokens,
            rates=self.rates,
        )
        return Planner(self.mesh, self.sharding, costs)


def build_model(model: ModelConfig, *, vocabulary: int, seed: int, dtype: torch.dtype) -> VideoLM:
    """Make the model with new weights, the same on every rank; a pretrained decoder's are on torch's meta device."""
    width, decoder = model.backbone.width, model.decoder(vocabulary)
    torch.manual_seed(seed)
    encoders = {kind: encoder.build(width) for kind, encoder in model.encoders.items()}
    with torch.device("meta") if model.pretrained else nullcontext():
        backbone = decoder.backbone.build()
        built = VideoLM(backbone, encoders, vocabulary=decoder.vocabulary, tied_head=decoder.tied_head)
        model.lora.adapt(built.backbone)
    return built.to(dtype)


def cost_model(
    model: ModelConfig,
    *,
    vocabulary: int,
    dtype: torch.dtype,
    call_tokens: int,
    rates: Rates,
    parts: PartsConfig = EVERYTHING,
) -> CostModel:
    """Price the model's parts by the methods of their configs."""
    backbone, width, size = model.backbone, model.backbone.width, dtype.itemsize
    return CostModel(
        encoder_flops={kind: partial(encoder.flops, width=width) for kind, encoder in model.encoders.items()},
        encoder_bytes={
            kind: partial(encoder.activation_bytes, element_size=size, width=width)
            for kind, encoder in model.encoders.items()
        },
        linear_flops=backbone.flops_per_token(),
        layers=_layer_costs(backbone),
        label_flops=2 * width * vocabulary,
        token_bytes=backbone.activation_bytes_per_token(size),
        label_bytes=2 * width * size,
        row_bytes=width * size,
        call_tokens=call_tokens,
        rates=rates,
        step_percent=_step_percent(model, parts),
    )


def _step_percent(model: ModelConfig, parts: PartsConfig) -> dict[str, int]:
    """FLOPs of a training step by stage, in percent of the forward's.

    Backward takes the forward's for the gradients of inputs and as much for those of weights that train. Computed again
    are two of the gated MLP's products, the scores of softmax attention, and with checkpointing each block.
    """
    backbone, lora = model.backbone, model.lora
    again = 100 if backbone.checkpointing else 0
    is_gated_whole = not lora.rank or not {"gate", "up", "down"} & set(lora.targets)
    mlp = 4 * backbone.layers * backbone.width * backbone.mlp_width if is_gated_whole else 0
    head = parts.embedding if model.tied_head else parts.head
    return {
        "encode": 100 if len(parts.frozen_encoders) == len(model.encoders) else 300,
        "linear": (300 if parts.backbone else 200) + again + 100 * mlp // backbone.flops_per_token(),
        "attention": 350 + again,
        "recurrent": 300 + again,
        "loss": 300 if head else 200,
    }


def _layer_costs(backbone: BackboneConfig) -> tuple[LayerCost, ...]:
    """Group equal layers and price their attention."""
    counts: dict[Any, int] = {}
    for variant in backbone.variants:
        counts[variant] = counts.get(variant, 0) + 1
    return tuple(
        LayerCost(
            count=count,
            heads=shape.heads,
            pair_flops=variant.pair_flops(shape.head_dim),
            token_flops=variant.token_flops(shape.head_dim),
            window=variant.window,
            sink=variant.sink,
            mode=variant.mode,
        )
        for variant, shape, count in ((variant, backbone.shape(variant), count) for variant, count in counts.items())
    )


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans rows and steps for a mesh: a pure function of the rows, the config and the rates."""

    mesh: MeshConfig
    sharding: ShardingConfig
    costs: CostModel

    def row(self, row: TokenSequence) -> ShardPlan:
        """Plan one row over the context-parallel ranks of a group."""
        strategy = STRATEGIES[self.sharding.strategy]
        shape, needs = (self.mesh.ring, self.mesh.ulysses), layer_needs(self.costs.layers)
        return strategy(row, shape, row_costs(row, self.costs), needs, self.sharding.cap_bytes)

    def step(self, rows: Sequence[TokenSequence]) -> StepPlan:
        """Plan an optimizer step of these rows."""
        return plan_step(rows, groups=self.mesh.data, plan_row=self.row, cost=self._cost)

    def _cost(self, row: TokenSequence) -> int:
        """Nanoseconds of a step of the row on a group, decoding beside the compute stages, all even."""
        return row_costs(row, self.costs).least_step_ns(self.mesh.cp)
