"""The settings of Hugging Face processors, read from a checkpoint's files."""
