"""`moe-opt demo`: see a capability work on the demo model, with texts of our own."""
