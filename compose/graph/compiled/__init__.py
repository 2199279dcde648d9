"""What torch.compile and torchao make of a step: kernels of several ops, casts to fp8."""
