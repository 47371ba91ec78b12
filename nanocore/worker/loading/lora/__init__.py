"""Adapters of low rank (LoRA: Hu et al. 2021) in PEFT's layout, merged into weights at load."""
