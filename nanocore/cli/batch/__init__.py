"""`nanocore batch`: answers requests from a file, by the code that answers them over HTTP."""
