"""`vitwire bench`: the load, what it measures, and the search for a capacity."""
