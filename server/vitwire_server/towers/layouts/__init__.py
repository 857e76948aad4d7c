"""Layouts of pixels: the family of each, and the tower that makes one forward of them."""
