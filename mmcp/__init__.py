"""Plan-first training of video-language models on long clips over context-parallel ranks."""
