"""Files and pictures decoded and prepared in separate processes."""
