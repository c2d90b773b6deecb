"""How much a video changes, told from the packet sizes in its index; nothing is decoded.

An encoder has measured the change already: a predicted packet holds what the pictures before it did not show. Its bytes
are the change of its frame. A key frame holds a whole picture, whether anything changed or not:

- One that comes when it is due (after the longest distance between key frames that the file has twice, or at a multiple
  of it from the start) counts by how far its size is from that of the key frame before, less what the packets between
  them hold, and at least as much as the median predicted packet of its group.
- One that comes early was put there by the encoder for a cut, and counts in full.

All numbers are integers of bytes and ticks, so that every rank and machine gets the same.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from data_pipelines.container import ClipIndex, VideoTrack

EVEN = 1000  # score of an interval that changes as much a second as the whole clip
JITTER = 1  # frames by which a key frame that is due may be off, as at 29.97 frames a second


def frame_changes(track: VideoTrack) -> np.ndarray:
    """[f] int64: bytes by which each frame is new against the picture before it; 0 for the first frame."""
    changes = track.sizes[np.asarray(track.packet)]
    keys = np.flatnonzero(np.isin(track.packet, track.entry_packets))
    key_sizes, is_due = changes[keys], _due(keys)
    ends = np.append(keys[1:], track.num_frames)
    for i in range(1, len(keys)):
        if is_due[i]:
            predicted = np.sort(changes[keys[i] + 1 : ends[i]])
            usual = int(predicted[len(predicted) // 2]) if len(predicted) else 0
            known = int(changes[keys[i - 1] + 1 : keys[i]].sum())
            changes[keys[i]] = max(usual, abs(int(key_sizes[i] - key_sizes[i - 1])) - known)
    changes[0] = 0
    return changes


def _due(keys: np.ndarray) -> np.ndarray:
    """[k] bool: which key frames come at the regular distance; keys: [k] their frame numbers, increasing."""
    distances = np.sort(np.diff(keys))[::-1]
    twice = distances[:-1][distances[:-1] - distances[1:] <= JITTER]
    if not len(twice):
        return np.zeros(len(keys), dtype=bool)
    period = int(twice[0])
    off_grid = np.minimum(keys % period, -keys % period)
    return (np.diff(keys, prepend=keys[0]) >= period - JITTER) | (off_grid <= JITTER)


def change_scores(index: ClipIndex, edges: Sequence[Fraction]) -> np.ndarray:
    """Score the intervals between times: change a second, EVEN where it is that of the whole clip.

    edges:   [n + 1]  seconds on the clip's clock, increasing
    returns: [n] int64, at least 0; 0 where no frame begins, EVEN everywhere when nothing in the clip changes
    """
    track = index.video
    if track is None:
        raise ValueError("a clip without pictures has no scene changes; score only clips with a video track")
    spans = [later - earlier for earlier, later in pairwise(edges)]
    if any(span <= 0 for span in spans):
        raise ValueError(f"edges must increase, got {', '.join(map(str, edges))}")
    total = np.concatenate([[0], np.cumsum(frame_changes(track))])
    ticks = [-(-(edge + index.origin) // track.time_base) for edge in edges]
    between = np.diff(total[np.searchsorted(track.pts, ticks)]).tolist()
    length = index.video_end - index.frame_time(0)
    whole = int(total[-1])
    if not whole:
        return np.full(len(spans), EVEN, dtype=np.int64)
    scores = [int(change * EVEN * length / (whole * span)) for change, span in zip(between, spans, strict=True)]
    return np.array(scores, dtype=np.int64)
