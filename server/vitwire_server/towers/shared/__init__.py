"""Parts that towers of several makers share."""
