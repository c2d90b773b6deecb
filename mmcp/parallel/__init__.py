"""Everything that happens between ranks: the mesh, its exchanges, and what makes a one-rank model parallel."""
