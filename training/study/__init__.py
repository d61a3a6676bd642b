"""Scaling studies: the same training on more and more workers. See ``series`` for the figures"""
