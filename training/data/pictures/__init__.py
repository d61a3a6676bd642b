"""Pictures of any size on disk or in S3, as batches on the device. This file is for laptops too.

A set is a tree of folders, tar shards with an index, or packed shards of shrunken pictures; all
three number their samples alike. ``library`` opens a set, ``batches`` gives each rank its batches,
``prepare`` makes shards of what was downloaded. Use ``training.data.small_images`` for sets of
small pictures that fit on the device as a whole.
"""
