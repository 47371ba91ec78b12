"""Models in llama.cpp's format: one file, or a few, with weights, settings and tokenizer."""
