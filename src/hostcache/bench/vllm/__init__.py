"""`hostcache bench vllm`: the tier inside real vLLM servers, beside vLLM without it and other connectors."""
