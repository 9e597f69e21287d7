"""The embedded engine: a compact real inference engine in PyTorch, a driver of the tier, with an OpenAI-compatible server."""
