"""Anthropic's Messages API: the images of its requests, and its translation to chat completions and back.

An engine whose `/v1/messages` takes no embeddings gets a chat request (`chat_requests`), and its answer becomes a
message (`answers`, streamed: `message_events`; both of `message_parts`). All functions are pure.
"""
