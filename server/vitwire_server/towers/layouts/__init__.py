"""How pixels become one forward: a family and a tower for each layout of pixels."""
