"""From settings to a model that can encode, in three steps: placed on its device, captured, loaded."""
