"""Anthropic's Messages API: the images of its requests, and its translation to chat completions and back.

An engine whose `/v1/messages` takes no embeddings gets a chat request (`chat_requests`), and its answer becomes a
message (`chat_answers`; streamed: `message_events`). All functions are pure.
"""
