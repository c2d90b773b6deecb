"""The video-language model on one rank: rotary, decoder blocks, backbone, head. It knows nothing of other ranks."""
