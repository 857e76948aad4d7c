"""Matrix products of a tower, tuned during capture: the algorithm that was fastest for a number of rows."""
