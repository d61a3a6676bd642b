"""Storage: the bucket, the image repositories and the shared file system."""
