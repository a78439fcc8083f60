"""What runs inside a forward pass: the hook into Transformers, brownout, the recorder."""
