"""OpenAI's Responses API: requests, items, encoders and stored responses."""
