"""A decoder that never comes back from some files; a worker imports it by name, so it stands apart from torch."""

import os
import signal
import time

from data_pipelines.decode_units import decode_units


def decode_but_hang_on_sound(kind, file, index, units, log_mel, needed, **options):
    """Decode as ever, but never come back from a WAV file."""
    if index is not None and index.format == "wav":
        time.sleep(10_000)
    return decode_units(kind, file, index, units, log_mel, needed, **options)


def decode_but_die_of_sound(kind, file, index, units, log_mel, needed, **options):
    """Decode as ever, but crash on a WAV file."""
    if index is not None and index.format == "wav":
        os.kill(os.getpid(), signal.SIGSEGV)
    return decode_units(kind, file, index, units, log_mel, needed, **options)
