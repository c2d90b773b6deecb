"""Which stretch of a media file a row asks for, and how finely at most and at least: the options of Qwen's items.

`video_start` and `video_end` (seconds on the clip's clock), `fps`, `nframes`, `min_frames`, `max_frames`, `min_pixels`,
`max_pixels` and `total_pixels` mean what they mean in qwen_vl_utils, with these differences: frames are those a player
shows at exact times, a picture is never enlarged, and a count of frames is not rounded to pairs, since the last group
is filled by repeating its last frame. Every other option is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

SECONDS = ("video_start", "video_end", "fps")
COUNTS = ("nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels")
OPTIONS = {"video": (*SECONDS, *COUNTS), "image": ("min_pixels", "max_pixels"), "audio": ()}
"""Options by kind of item."""
REFUSED = {
    "resized_height": "write max_pixels; the sides follow the picture's proportions",
    "resized_width": "write max_pixels; the sides follow the picture's proportions",
    "sample_fps": "it tells of frames that were extracted before; name the video itself",
    "raw_fps": "it tells of frames that were extracted before; name the video itself",
}
"""Options of Qwen's items that are not read, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a row asks of one media file; None: nothing."""

    video_start: Fraction | None = None
    """Seconds at which it begins."""
    video_end: Fraction | None = None
    """Seconds at which it ends."""
    fps: Fraction | None = None
    """Most frames a second."""
    nframes: int | None = None
    """Most frames, evenly spread; instead of fps."""
    min_frames: int | None = None
    """Raises the rate of a short clip to this many frames, if it has them."""
    max_frames: int | None = None
    """Lowers the rate of a long clip to this many frames."""
    min_pixels: int | None = None
    """Least pixels of a frame or image."""
    max_pixels: int | None = None
    """Most pixels of a frame or image."""
    total_pixels: int | None = None
    """Most pixels of all frames together."""

    def __post_init__(self):
        start, end = self.video_start, self.video_end
        if start is not None and end is not None and end <= start:
            raise ValueError(f"has video_end {float(end):g} not after video_start {float(start):g}; exchange them")
        if self.fps is not None and self.nframes is not None:
            raise ValueError("has both fps and nframes; use one")
        for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and most < least:
                raise ValueError(f"has {high} {most} below {low} {least}; exchange them")

    def to_fields(self) -> dict[str, Any]:
        """Return what is set, as JSON values: exact times as text."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _as_json(value) for name, value in values.items() if value is not None}


WHOLE = View()
"""All of a file, as finely as the budget allows."""


def read_view(kind: str, data: Mapping[str, Any]) -> View:
    """Read the options of an item of some kind. Raises ValueError that quotes field and value."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name in REFUSED:
            raise ValueError(f"has the field '{name}' in a {kind} item, which is not read; {REFUSED[name]}")
        if name not in OPTIONS[kind]:
            known = ", ".join(OPTIONS[kind]) or "none"
            raise ValueError(f"has the unknown field '{name}' in a {kind} item; known options: {known}")
        if value is not None:
            values[name] = _seconds(name, value) if name in SECONDS else _count(name, value)
    return View(**values) if values else WHOLE


def _seconds(name: str, value: Any) -> Fraction:
    """Read a time or a rate: a number, or the text of one, such as "1/3"."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"has {name} {value!r}, which is no number") from None
    if number < 0 or (name == "fps" and not number):
        raise ValueError(f"has {name} {value!r}; use a number {'above' if name == 'fps' else 'of at least'} 0")
    return number


def _count(name: str, value: Any) -> int:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    if not is_whole or value < 1:
        raise ValueError(f"has {name} {value!r}; use a whole number of at least 1")
    return int(value)


def _as_json(value: Fraction | int) -> str | int:
    return value if isinstance(value, int) else str(value)
