"""The packets of one track by number, as its index counts them."""

from collections.abc import Iterator
from typing import Any

import av

from data_pipelines.container import AudioTrack, VideoTrack
from data_pipelines.media import MediaError, demux

READ_THROUGH = 64  # packets: a shorter way ahead is read, not jumped over
STEPS_BACK = (0, 1, 5, 30)  # seconds: where a seek lands too late, it aims earlier


class TrackReader:
    """Reads the packets of a track in the order of the file, from any number.

    Where a seek lands is never trusted: packets are recognised by their pts. A track whose pts do not allow that is
    counted from the start of the file.
    """

    def __init__(self, container: av.container.InputContainer, track: VideoTrack | AudioTrack, path: str):
        self.container, self.track, self.path = container, track, path
        self.stream: Any = container.streams[track.stream]
        self.decoder: Any = self.stream.codec_context
        self.decoder.thread_count = 1
        self.next_number = 0
        self.waiting: av.Packet | None = None
        self.packets = self._demux()

    def go_to(self, number: int) -> None:
        """Make `number` the next packet that `read` returns."""
        if not 0 <= number - self.next_number <= READ_THROUGH and self.track.seekable:
            self._seek(number)
        if number < self.next_number:
            raise MediaError(self.path, f"packet {number} cannot be found again, its time stamps are broken")
        while self.next_number < number:
            self.read()

    def read(self) -> av.Packet:
        """Return the next packet. Raises MediaError when the file ends before it."""
        packet, self.waiting = self.waiting, None
        if packet is None:
            packet = next(self.packets, None)
        if packet is None:
            raise MediaError(self.path, f"ends at packet {self.next_number}, its index promises more")
        self.next_number += 1
        return packet

    def _demux(self) -> Iterator[av.Packet]:
        for packet in demux(self.container, self.stream):
            if packet.size:
                yield packet

    def _seek(self, number: int) -> None:
        """Move to packet `number`, which stays waiting; a packet without a stamp of its own is left to counting."""
        stamp = self.track.stamp(number)
        if stamp is None:
            return
        for seconds in STEPS_BACK:
            self.container.seek(int(stamp - seconds / self.track.time_base), stream=self.stream, backward=True)
            packets = self._demux()
            for packet in packets:
                found = None if packet.pts is None else self.track.find(packet.pts)
                if found is not None and found >= number:
                    if found == number:
                        self.packets, self.waiting, self.next_number = packets, packet, number
                        return
                    break
        raise MediaError(self.path, f"packet {number} is not where the index says; the file has changed")
