"""What a step will take before it is run: memory, bytes moved and seconds of each rank, and the mesh that fits best."""
