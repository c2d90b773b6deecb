<<<<<<< .merge_file_efLP7O
"""From media files and manifests to decoded units: everything before the first tensor of a model."""
=======
"""From media files and a manifest to the units of a step: index, decode, shards, order, packing.

Imports nothing of `encoders` or torch.distributed; decoding imports no torch at all, since workers are many.
"""
>>>>>>> .merge_file_TrCFpw
