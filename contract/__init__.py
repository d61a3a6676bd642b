"""What stacks, nodes, command line and recipes agree on: the ground floor.

Standard library only: a laptop that submits jobs has neither torch nor Ray, and a Lambda function
has nothing else. Renaming what reaches a bucket or a stack's output breaks what is there already.
"""
