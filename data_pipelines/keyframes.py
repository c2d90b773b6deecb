"""What the first bytes of a video packet say: whether a decoder may start there, and whether a picture is shown.

Containers mark key frames; the mark alone is not enough. Pictures that follow an open key frame in the file but come
before it on the screen refer back across it, and some encoders mark pictures from which decoding only recovers.
"""

from collections.abc import Iterator

CLOSED = "closed"  # every picture after it in the file can be decoded from it
OPEN = "open"  # every picture after it in the file and on the screen can be
UNSAFE = "unsafe"  # marked as a key frame, but a decoder that starts here is not known to be exact

_IDR, _SLICE, _SEI, _RECOVERY_POINT = 5, 1, 6, 6  # H.264 (ITU-T H.264 table 7-1, annex D)
_HEVC_IDR, _HEVC_OPEN = (19, 20), (16, 17, 18, 21)  # HEVC (ITU-T H.265 table 7-1): IDR; BLA and CRA
_GROUP_START = b"\x00\x00\x01\xb8"  # MPEG-2 (ITU-T H.262, 6.2.2.6)


def entry_kind(codec: str, extradata: bytes, data: bytes) -> str:
    """Classify a packet that the container marks as a key frame: CLOSED, OPEN or UNSAFE."""
    if codec == "h264":
        return _h264_entry(nal_units(extradata, data, length_at=4))
    if codec == "hevc":
        return _hevc_entry(nal_units(extradata, data, length_at=21))
    if codec in ("mpeg1video", "mpeg2video"):
        at = data.find(_GROUP_START)
        return CLOSED if at >= 0 and len(data) > at + 7 and data[at + 7] & 0x40 else OPEN
    return OPEN


def is_shown(codec: str, data: bytes) -> bool:
    """Whether the packet holds a picture to be shown; VP8 stores hidden reference pictures as packets of their own."""
    return codec != "vp8" or bool(data[0] & 0x10)  # RFC 6386, 9.1: show_frame


def nal_units(extradata: bytes, data: bytes, *, length_at: int) -> Iterator[bytes]:
    """Split a packet of H.264 or HEVC into units, with start codes (annex B) or with lengths (avcC, hvcC).

    length_at: the byte of `extradata` whose two lowest bits are the size of a length, less one.
    """
    if len(extradata) <= length_at or extradata[0] != 1:
        yield from (unit for unit in data.split(b"\x00\x00\x01") if unit.rstrip(b"\x00"))
        return
    width, position = (extradata[length_at] & 3) + 1, 0
    while position + width < len(data):
        size = int.from_bytes(data[position : position + width], "big")
        if size:
            yield data[position + width : position + width + size]
        position += width + size


def _h264_entry(units: Iterator[bytes]) -> str:
    recovers_at_once = False
    for unit in units:
        kind = unit[0] & 31
        if kind == _IDR:
            return CLOSED
        if kind == _SEI:
            recovers_at_once |= _recovers_at_once(unit)
        if kind == _SLICE:
            break
    return OPEN if recovers_at_once else UNSAFE


def _recovers_at_once(unit: bytes) -> bool:
    """Whether an SEI unit holds a recovery point whose count of frames until recovery is 0."""
    position = 1
    while position + 2 < len(unit):
        kind, position = _sei_number(unit, position)
        size, position = _sei_number(unit, position)
        if kind == _RECOVERY_POINT:
            return position < len(unit) and bool(unit[position] & 0x80)  # ue(v): 0 is the single bit 1
        position += size
    return False


def _sei_number(unit: bytes, position: int) -> tuple[int, int]:
    """Read a type or a size: bytes of 255 that add up, and a last one. Returns it and where it ends."""
    value = 0
    while position < len(unit):
        value, position = value + unit[position], position + 1
        if unit[position - 1] != 255:
            break
    return value, position


def _hevc_entry(units: Iterator[bytes]) -> str:
    for unit in units:
        kind = unit[0] >> 1 & 63
        if kind < 32:
            return CLOSED if kind in _HEVC_IDR else OPEN if kind in _HEVC_OPEN else UNSAFE
    return UNSAFE
