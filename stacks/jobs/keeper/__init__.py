"""Code of the function that admits jobs and cleans up after them."""
