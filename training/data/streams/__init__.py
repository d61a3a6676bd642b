"""Text in S3 that may be larger than a disk: made into shards of tokens, and read in blocks."""
