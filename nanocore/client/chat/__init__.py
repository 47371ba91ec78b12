"""Chats: messages become a prompt, and the model's text becomes typed events. Needs no torch.

Each part can be used alone: the template (`template`, `renderer`), the parsers of reasoning and
tool calls (`parsing`), the grammars of forced answers (`constraints`), and the events of a streamed
answer (`events`).
"""
