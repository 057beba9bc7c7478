"""Readers of recorded workloads, one module per family of files; `sim.trace` is their door."""
