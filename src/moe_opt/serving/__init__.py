"""Processes and HTTP: the engine, the API in front of it, and the router over many of them."""
