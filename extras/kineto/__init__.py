"""Traces of torch.profiler (Kineto) as rows: those of users, and of steps profiled op by op."""
