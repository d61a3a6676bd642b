"""What starts a recipe's processes."""
