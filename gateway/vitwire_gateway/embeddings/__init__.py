"""Embeddings of images as an answer, in the forms of OpenAI's and Cohere's API.

`embedding_requests` reads requests, `embedding_answers` writes answers. Both are pure. `openapi.json` describes both.
"""
