"""From a command's options to a submitted job: its request, code, plan and price."""
