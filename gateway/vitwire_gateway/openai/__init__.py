"""OpenAI's APIs that generate text: the images and clips of their requests. All functions are pure."""
