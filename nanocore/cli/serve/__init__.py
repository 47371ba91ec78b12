"""`nanocore serve`: a model over HTTP."""
