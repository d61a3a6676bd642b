"""Runs in the bucket: lists, curves, downloads, removal."""
