"""From media files and manifests to decoded units: everything before the first tensor of a model.

Nothing here imports torch, so that decode workers stay small.
"""
