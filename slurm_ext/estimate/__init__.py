"""What a job would take in each configuration: table, interpolation, history. Imports nothing."""
