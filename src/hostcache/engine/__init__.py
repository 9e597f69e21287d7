"""The embedded engine: a compact real inference engine in PyTorch, driving the tier, with an OpenAI-compatible server."""
