"""Which rank decodes, encodes and holds what: index algebra on metadata, no torch.distributed."""
