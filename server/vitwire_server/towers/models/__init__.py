"""One file per maker: its rows of the table of models, and what only they need."""
