"""Files and pictures decoded and prepared in processes of their own."""
