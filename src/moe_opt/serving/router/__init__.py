"""The prefill/decode router: one asyncio process between clients and workers, without torch."""
