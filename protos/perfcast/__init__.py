"""The gRPC contract of perfcast."""
