"""Cluster: ECS, its hosts, and the tasks and services of Ray's nodes."""
