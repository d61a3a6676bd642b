"""Stacks of the CDK app, and the settings that shape them."""
