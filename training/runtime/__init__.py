"""Processes of a recipe, started locally, by torchrun or on a Ray cluster."""
