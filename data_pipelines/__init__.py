"""From media files and a manifest to the units of a step: index, decode, shards, order, packing.

Imports nothing of `encoders` or torch.distributed; decoding imports no torch at all, since workers are many.
"""
