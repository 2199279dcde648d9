"""The report: one self-contained HTML page per device, made of what a comparison left on disk."""
