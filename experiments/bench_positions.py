"""How long does it take to place the tokens of an hour, here and in transformers?

Run:     python -m experiments.bench_positions
Expect:  under 20 ms here where transformers takes seconds; the same positions within the clip.
Result:  experiments/LOG.md, entry "positions"
"""

import time
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as vl
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni3
from transformers.models.qwen3_vl import modeling_qwen3_vl as vl3

from mmcp.positions import positions_mrope, positions_time_aligned
from mmcp.sequence import Segment, TokenSequence, Unit

GROUPS, GRID, STEP = 1800, (9, 12), 2  # two frames each two seconds, 9 x 12 rows
IMAGE, VIDEO, AUDIO, VISION_START, AUDIO_START, TEXT = 101, 102, 103, 104, 105, 9
REPEATS = 5


def group(number: int) -> Unit:
    """Make one frame group of the hour."""
    count, start = GRID[0] * GRID[1], Fraction(STEP * number)
    return Unit(num_tokens=count, start=start, end=start + STEP, grid=(1, *GRID), size=(2, 252, 336), items=())


def text(*ids: int) -> Segment:
    """Make a text segment."""
    return Segment(kind="text", ids=ids)


def in_one_segment() -> TokenSequence:
    """Lay the hour out as Qwen2.5-VL does."""
    return TokenSequence((text(TEXT), Segment(kind="video", units=tuple(map(group, range(GROUPS)))), text(TEXT)))


def stamped() -> TokenSequence:
    """Lay the hour out as Qwen3-VL does: the time in words before each group."""
    segments = [x for n in range(GROUPS) for x in (text(*(TEXT,) * 8), Segment(kind="video", units=(group(n),)))]
    return TokenSequence((text(TEXT), *segments, text(TEXT)))


def with_sound(rate: int) -> TokenSequence:
    """Lay the hour out as the Omni models do: a group, then the sound until the next."""
    segments = []
    for number in range(GROUPS):
        start, rows = Fraction(STEP * number), STEP * rate
        unit = Unit(num_tokens=rows, start=start, end=start + STEP, grid=(rows, 1, 1), size=(200,), items=())
        segments.append(Segment(kind="video", source="clip", units=(group(number),)))
        segments.append(Segment(kind="audio", source="clip", units=(unit,)))
    return TokenSequence((text(TEXT, VISION_START, AUDIO_START), *segments, text(106, 107, TEXT)))


def kinds(sequence: TokenSequence) -> np.ndarray:
    """[s]: 0 text, 2 video, 3 audio."""
    number = {"text": 0, "video": 2, "audio": 3}
    return sequence.per_token(np.array([number[segment.kind] for segment in sequence.segments]))


def of_vision(module: Any, name: str, sequence: TokenSequence) -> np.ndarray:
    """Ask Qwen2.5-VL or Qwen3-VL."""
    theirs = getattr(module, name)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.config.vision_config.tokens_per_second = 2
    model.get_vision_position_ids = lambda *a, **k: theirs.get_vision_position_ids(model, *a, **k)
    options = {"second_per_grid_ts": torch.tensor([float(STEP)])} if name == "Qwen2_5_VLModel" else {}
    positions, _ = theirs.get_rope_index(
        model,
        torch.zeros(1, sequence.num_tokens, dtype=torch.long),
        mm_token_type_ids=torch.from_numpy(kinds(sequence))[None],
        video_grid_thw=torch.tensor([[GROUPS, 2 * GRID[0], 2 * GRID[1]]]),
        **options,
    )
    return positions[:, 0].numpy()


def of_omni(module: Any, name: str, sequence: TokenSequence, rate: int) -> np.ndarray:
    """Ask Qwen2.5-Omni or Qwen3-Omni."""
    theirs = getattr(module, name)
    config = SimpleNamespace(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        vision_start_token_id=VISION_START,
        audio_start_token_id=AUDIO_START,
        position_id_per_seconds=rate,
        seconds_per_chunk=2,
        audio_config=SimpleNamespace(n_window=50),
    )
    model = SimpleNamespace(config=config, spatial_merge_size=2)
    model.get_llm_pos_ids_for_vision = lambda *a, **k: theirs.get_llm_pos_ids_for_vision(model, *a, **k)
    if hasattr(theirs, "get_chunked_index"):
        model.get_chunked_index = lambda *a, **k: theirs.get_chunked_index(model, *a, **k)
    kind = kinds(sequence)
    ids = np.select([kind == 2, kind == 3], [VIDEO, AUDIO], sequence.ids)
    return theirs.get_rope_index(
        model,
        torch.from_numpy(ids)[None],
        video_grid_thw=torch.tensor([[GROUPS, 2 * GRID[0], 2 * GRID[1]]]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([100 * STEP * GROUPS]),
        second_per_grids=torch.tensor([float(STEP)]),
    )[0][:, 0].numpy()


def fastest(function: Callable[[], np.ndarray], repeats: int) -> tuple[float, np.ndarray]:
    """Return the least seconds of some calls, and what they gave."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        found = function()
        seconds.append(time.perf_counter() - began)
    return min(seconds), found


def main() -> None:
    """Time all layouts and print the table."""
    table = Table(title=f"positions of an hour, {GROUPS} groups of {GRID[0]} x {GRID[1]} rows")
    for heading in ("as", "tokens", "here, ms", "transformers, ms", "times", "largest difference within the clip"):
        table.add_column(heading, justify="left" if heading == "as" else "right")
    one, many, at_25, at_13 = in_one_segment(), stamped(), with_sound(25), with_sound(13)
    cases: list[tuple[str, TokenSequence, Callable[[], np.ndarray], Callable[[], np.ndarray]]] = [
        ("Qwen2.5-VL", one, lambda: positions_mrope(one), lambda: of_vision(vl, "Qwen2_5_VLModel", one)),
        ("Qwen3-VL", many, lambda: positions_mrope(many), lambda: of_vision(vl3, "Qwen3VLModel", many)),
        (
            "Qwen2.5-Omni",
            at_25,
            lambda: positions_time_aligned(at_25, brackets=2),
            lambda: of_omni(omni, "Qwen2_5OmniPreTrainedModelForConditionalGeneration", at_25, 25),
        ),
        (
            "Qwen3-Omni",
            at_13,
            lambda: positions_time_aligned(at_13, Fraction(13), is_fractional=True),
            lambda: of_omni(omni3, "Qwen3OmniMoePreTrainedModelForConditionalGeneration", at_13, 13),
        ),
    ]
    for name, sequence, ours, theirs in cases:
        own_s, own = fastest(ours, REPEATS)
        their_s, their = fastest(theirs, 1)
        inside = slice(None, -sequence.segments[-1].num_tokens)
        apart = float(np.abs(own[:, inside] - their[:, inside]).max())
        figures = (f"{sequence.num_tokens:,}", f"{own_s * 1e3:.1f}", f"{their_s * 1e3:.0f}", f"{their_s / own_s:.0f}")
        table.add_row(name, *figures, f"{apart:g}")
    Console().print(table)


if __name__ == "__main__":
    main()
