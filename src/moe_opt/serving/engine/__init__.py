"""Continuous batching over a paged KV cache. Types and settings import without torch; the engine itself does not."""
