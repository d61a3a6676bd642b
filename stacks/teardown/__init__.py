"""Teardown: the custom resources that end tasks and hosts on ``cdk destroy``."""
