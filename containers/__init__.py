"""Node package: what runs in the containers of the head and of the workers."""
