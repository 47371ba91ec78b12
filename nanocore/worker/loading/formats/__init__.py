"""Checkpoints that are quantized already, one file for each format; `select` chooses among them."""
