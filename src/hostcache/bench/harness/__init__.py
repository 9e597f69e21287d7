"""Measures any server with a prefix cache over OpenAI's API: cells, their workloads, and the records they leave."""
