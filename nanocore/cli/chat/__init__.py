"""`nanocore chat`: a conversation in a terminal, or one question in a pipe."""
