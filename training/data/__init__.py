"""Data of the recipes: where it comes from, how it is read, which batch belongs to which step."""
