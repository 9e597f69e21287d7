"""The embedded engine: a compact real inference engine in PyTorch that drives the tier, and its server."""
