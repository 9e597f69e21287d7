"""The tier inside vLLM: a KV connector named HostCacheConnector, and `hostcache vllm serve`.

Importing this imports neither vLLM nor torch; the module that vLLM loads is `connector`.
"""
