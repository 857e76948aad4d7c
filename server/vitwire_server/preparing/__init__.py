"""Pictures and files to the pixels that the model's Hugging Face processor would return."""
