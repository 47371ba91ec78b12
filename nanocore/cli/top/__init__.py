"""`nanocore top`: a live view of an engine."""
