"""The cause of an unstable run by experiment: short arms from a checkpoint before the onset, one change each."""
