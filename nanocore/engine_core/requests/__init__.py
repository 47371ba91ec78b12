"""A request inside the engine: its tokens and limits, its times, and how it ends."""
