"""Demo models, a file per layout: add a model to the file of its layout."""
