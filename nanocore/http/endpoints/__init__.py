"""Endpoints other than generation: embeddings, tokenizer, status, metrics and the web page."""
