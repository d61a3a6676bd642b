"""Files of a user's program: which are kept, their copy in the bucket, what a start restores."""
