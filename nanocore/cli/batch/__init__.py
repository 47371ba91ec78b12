"""`nanocore batch`: runs requests from a file through the HTTP application."""
