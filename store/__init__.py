"""Files in S3 and on this host's disk: one way to write, read, list, remove and cache them."""
