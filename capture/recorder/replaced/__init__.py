"""What runs in place of torch's own on fake tensors: ops, compiled code, unknown lengths."""
