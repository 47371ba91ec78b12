"""Conversations: messages to a prompt, and a model's text to typed events. No torch.

Each part is usable alone: the template (`template`, `renderer`), the parsers of reasoning and tool
calls (`parsing`), the grammars of forced answers (`constraints`), and the events that a streamed
answer is made of (`events`).
"""
