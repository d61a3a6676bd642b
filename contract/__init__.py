"""Types and constants that stacks, nodes, command line and recipes share. Standard library only.

Standard library only: a laptop that submits jobs has neither torch nor Ray, and a Lambda function
has nothing else. Renaming what reaches a bucket or a stack's output breaks what is there already.
"""
