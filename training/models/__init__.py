"""Models, and what loads them."""
