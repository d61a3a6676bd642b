"""The CDK app's stacks: what is deployed, and the settings that shape it."""
