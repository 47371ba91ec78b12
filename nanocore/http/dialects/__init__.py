"""The dialects of clients: each reads its requests, and writes one vocabulary of events its way."""
