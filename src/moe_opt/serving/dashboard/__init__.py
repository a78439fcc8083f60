"""The page at /ui."""
