"""Commands about measured machines: fleets of them, single GPUs compared."""
