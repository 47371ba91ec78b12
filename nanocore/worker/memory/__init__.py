"""How much memory there is, and what a rank's KV cache may take of it."""
