"""The io thread and what it decides: sessions, admission, control operations, events."""
