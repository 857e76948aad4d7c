"""Images and clips decoded and prepared in processes of their own, with the client's own code."""
