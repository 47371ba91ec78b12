"""Cost of a step: bytes and operations of a model, and the speed of a machine."""
