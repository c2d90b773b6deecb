"""A request to stop, raised by SIGTERM or SIGINT: finish the step, save, leave."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """While its `with` block runs, the first SIGTERM or SIGINT only sets it; a second one does what it always did.

    with StopRequest() as stop:
        for step in ...:
            ...
            if all_reduce(torch.tensor(int(stop.is_set())), "max", ...):     # ranks get signals at different times
                save(...)
                break
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        """Tell whether this process has been asked to stop."""
        return self._event.is_set()

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self._event.is_set():
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
        self._event.set()
