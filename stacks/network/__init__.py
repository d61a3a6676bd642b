"""Network: the VPC, its endpoints and its flow logs."""
