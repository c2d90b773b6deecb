"""The modules behind the encoders' configs; importing them imports torch."""
